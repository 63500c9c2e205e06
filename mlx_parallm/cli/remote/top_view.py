"""What `mlx_parallm top` shows of a server: the state that was read, and its view."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_parallm.cli.train_table import duration, one_line, spark
from mlx_parallm.config import human_bytes

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

KEPT_INTERVALS = 300
RECENT_S = 10.0
"""Rates and shares are of the last so many seconds."""

_LABEL_WIDTH, _LEAST_BAR, _MOST_BAR = 10, 10, 60
_MEMORY = {
    "rows": "cyan",
    "cached_prefixes": "blue",
    "free_blocks": "bright_black",
    "adapters": "magenta",
    "training": "yellow",
}
_DEVICE = {"decode": "cyan", "prefill": "blue", "training": "yellow", "other": "magenta"}


@dataclass(slots=True)
class Reading:
    """What was read of a server, as its JSON.

    `intervals`: of `/v1/stats`, oldest first. `training`: the status of each trained adapter. `events_refused`: why the
    server sends no events. `failure`: why it does not answer now, and since when (Unix time). `note`: what happened to
    the server or to a command, for the view.
    """

    url: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    intervals: deque[Mapping[str, Any]] = field(default_factory=partial(deque, maxlen=KEPT_INTERVALS))
    adapters: Sequence[Mapping[str, Any]] = ()
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    events_refused: str = ""
    failure: tuple[str, float] | None = None
    note: str = ""

    @property
    def may_train(self) -> bool:
        """Whether the server trains, and the key may see that."""
        return self.stats["training"] is not None and self.stats["caller"]["role"] != "inference"

    @property
    def last_interval(self) -> int:
        return int(self.intervals[-1]["number"]) if self.intervals else 0

    def take(self, stats: Mapping[str, Any]) -> bool:
        """Takes an answer of `/v1/stats`. Returns whether the server was started again since the last one; its history
        is dropped then, and must be asked for again."""
        started_at = stats["started_at"]
        restarted = bool(self.stats) and started_at != self.stats["started_at"]
        self.stats, self.failure = stats, None
        if restarted:
            self.intervals.clear()
            self.note = f"the server was started again at {_clock(started_at)}"
        else:
            self.intervals.extend(stats["intervals"])
        return restarted

    def lost(self, why: str, at: float) -> None:
        """Notes that the server does not answer."""
        self.failure = (why, self.failure[1] if self.failure else at)

    def as_json(self) -> dict[str, Any]:
        """What was read, and the figures that the view computes of it."""
        return {
            "url": self.url,
            "tokens_per_second": self.rate("generated_tokens"),
            "prompt_tokens_per_second": self.rate("prompt_tokens"),
            "device_shares": self.device_shares(),
            "stats": {name: value for name, value in self.stats.items() if name != "intervals"},
            "adapters": list(self.adapters),
            "training": dict(self.training),
        }

    def rate(self, name: str) -> float:
        """A count of intervals, per second of the last ones."""
        recent = self._recent()
        seconds = sum(each["seconds"] for each in recent)
        return round(sum(each[name] for each in recent) / seconds, 1) if seconds else 0.0

    def device_shares(self) -> dict[str, float]:
        """The share of each kind of work in the device's time of the last intervals, 0 to 1."""
        recent = self._recent()
        seconds = sum(each["seconds"] for each in recent)
        return {kind: round(sum(each[kind] for each in recent) / seconds, 3) if seconds else 0.0 for kind in _DEVICE}

    def _recent(self) -> list[Mapping[str, Any]]:
        chosen: list[Mapping[str, Any]] = []
        for interval in reversed(self.intervals):
            if sum(each["seconds"] for each in chosen) >= RECENT_S:
                break
            chosen.append(interval)
        return chosen


def view(reading: Reading, width: int, keys: str = "") -> Group:
    """The view, at most `width` columns wide. `keys`: what keys do."""
    from rich.console import Group
    from rich.text import Text

    bar = min(max(width - 50, _LEAST_BAR), _MOST_BAR)
    lines = [*_banner(reading), *_load(reading, bar), *_memory(reading, bar), *_device(reading, bar)]
    lines += [*_adapters(reading), *_training(reading), *_events(reading, width)]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines, *([Text(keys, style="dim")] if keys else []))


def _banner(reading: Reading) -> Iterator[Text]:
    from rich.text import Text

    stats = reading.stats
    models = ", ".join(model["name"] for model in stats["models"] if model["state"] == "loaded")
    up = duration(time.time() - stats["started_at"])
    yield Text.assemble((reading.url, "bold"), f"  {models}  {stats['mode']}  {stats['state']}  up {up}")
    if reading.failure is not None:
        why, since = reading.failure
        yield Text(f"no answer since {_clock(since)}, and asked again: {why}", style="bold red")
    for notice in stats["notices"]:
        yield Text(notice, style="yellow")
    if reading.note:
        yield Text(reading.note, style="yellow")


def _load(reading: Reading, bar: int) -> Iterator[Text]:
    queue, latency = reading.stats["queue"], reading.stats["latency"]
    tokens = [each["generated_tokens"] / each["seconds"] for each in reading.intervals if each["seconds"]]
    prompts = f"{reading.rate('prompt_tokens'):.0f} prompt tokens/s"
    yield _line("tokens", f"{spark(tokens, bar)}  {reading.rate('generated_tokens'):.1f} tokens/s, {prompts}")
    yield _line("first", _latency(latency["first_token"]))
    yield _line("between", _latency(latency["between_tokens"]))
    held = f"{queue['held']} of {queue['limit']} places taken"
    yield _line("rows", f"{queue['running']} of {queue['rows']} run, {queue['waiting']} wait, {held}")


def _latency(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no token in the last minute"
    return ", ".join(f"{name} {_short(found[name])}" for name in ("p50", "p95", "p99"))


def _memory(reading: Reading, bar: int) -> Iterator[Text]:
    memory = reading.stats["memory"]
    parts = {name: memory[name] / memory["budget"] if memory["budget"] else 0.0 for name in _MEMORY}
    said = ", ".join(f"{name.replace('_', ' ')} {human_bytes(memory[name])}" for name in _MEMORY if memory[name])
    yield _bar("memory", parts, _MEMORY, bar, f"of {human_bytes(memory['budget'])}: {said or 'nothing held'}")
    yield _line("weights", human_bytes(memory["weights"]))


def _device(reading: Reading, bar: int) -> Iterator[Text]:
    shares = reading.device_shares()
    said = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.005)
    idle = max(0.0, 1.0 - sum(shares.values()))
    yield _bar("device", shares, _DEVICE, bar, f"{said}{', ' if said else ''}idle {idle:.0%}")


def _adapters(reading: Reading) -> Iterator[Text]:
    busy = [f"{card['id']} {card['leases']}" for card in reading.adapters if card["leases"]]
    live = sum(card["live"] for card in reading.adapters)
    yield _line("adapters", f"{live} live; requests now: {', '.join(busy) or 'none'}")


def _training(reading: Reading) -> Iterator[Text]:
    if reading.stats["training"] is not None and not reading.may_train:
        yield _line("training", "this key may not see it, nor its events; use one with the role train or admin")
    for name, status in reading.training.items():
        figures = {
            "reward": (status["reward_mean"], ".3f"),
            "mean": (status["reward_running_mean"], ".3f"),
            "loss": (status["loss"], "+.4f"),
            "KL": (status["kl"], ".4f"),
        }
        said = ", ".join(f"{label} {_number(value, form)}" for label, (value, form) in figures.items())
        yield _line("training", f"{name} {status['state']}, step {status['step']}, {said}")


def _events(reading: Reading, width: int) -> Iterator[Text]:
    if reading.events_refused:
        yield _line("events", f"the server sends none: {reading.events_refused}")
    for number, event in enumerate(reading.events):
        at = datetime.fromisoformat(event["at"]).astimezone().strftime("%H:%M:%S")
        data = ", ".join(f"{name} {value}" for name, value in event["data"].items() if isinstance(value, str | int))
        yield _line("events" if number == 0 else "", one_line(f"{at} {event['kind']} {data}", width - _LABEL_WIDTH - 2))


def _bar(label: str, parts: Mapping[str, float], colors: Mapping[str, str], width: int, said: str) -> Text:
    """A bar of parts, which are shares of the whole, and a text behind it."""
    from rich.text import Text

    line, done, drawn = Text(f"{label:<{_LABEL_WIDTH}}"), 0.0, 0
    for name, share in parts.items():
        done += share
        until = min(round(done * width), width)
        line.append("█" * (until - drawn), style=colors[name])
        drawn = max(drawn, until)
    return line.append("░" * (width - drawn), style="bright_black").append(f"  {said}")


def _line(label: str, text: str) -> Text:
    from rich.text import Text

    return Text(f"{label:<{_LABEL_WIDTH}}{text}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")
