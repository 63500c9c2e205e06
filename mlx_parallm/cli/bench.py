"""`mlx_parallm bench`: how fast a server is, ours or another one with OpenAI's API; or, with --report, this machine."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from mlx_parallm.cli.client import SERVER, Client
from mlx_parallm.cli.machine import show_nothing, show_result
from mlx_parallm.cli.parser import Parser, argument, at_least, group, takes
from mlx_parallm.cli.show import JSON, show, table
from mlx_parallm.errors import ConfigError, ParaLLMError

if TYPE_CHECKING:
    import httpx

    from mlx_parallm.bench.report import ReportSection

_COLUMNS = (
    *("at a time", "requests", "failed", "tok/s", "prompt", "answer"),
    *("first token ms", "95 %", "next token ms", "95 %", "whole s"),
)
_WARM_UP_TOKENS = 8
_MINUTES = 10
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "night", "point", "home", "water", "room", "mother", "area", "money", "story"),
    *("fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind"),
)
_OF_A_SERVER = (
    argument(
        "--concurrency",
        type=at_least(1),
        nargs="+",
        default=[1, 4, 16],
        metavar="N",
        help="Requests at a time; several numbers are measured one after the other. Default: 1 4 16.",
    ),
    argument("--requests", type=at_least(1), metavar="N", help="Requests of each number. Default: four times as many."),
    argument(
        "--prompt-words",
        type=at_least(1),
        default=128,
        metavar="N",
        help="Words of a prompt, most of which are one token. Default: %(default)s.",
    ),
    argument(
        "--max-tokens", type=at_least(1), default=64, metavar="N", help="Tokens of an answer. Default: %(default)s."
    ),
    argument(
        "--model",
        nargs="+",
        default=[None],
        metavar="NAME",
        help="The model or adapter of the requests; of several, requests name them in turn. Default: the server's.",
    ),
    argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="Let answers end where the model ends them, for servers that refuse the field ignore_eos.",
    ),
    *SERVER,
)
_OF_THE_REPORT = group(
    "without a server",
    argument("--report", type=Path, metavar="FILE", help="The file to write; one that exists is replaced."),
    argument(
        "--model-path",
        metavar="DIR_OR_HUB_ID",
        help="With --report: the model to measure, in place of the bundled one. Two copies of it must fit.",
    ),
    argument(
        "--sizes",
        choices=("gpu", "cpu", "tiny"),
        help="With --report: how much is measured. Default: by the device.",
    ),
    argument(
        "--minutes",
        type=at_least(1),
        metavar="N",
        help=f"With --report: the most minutes that it takes; what does not fit is left out. Default: {_MINUTES}.",
    ),
    description="Test and measure this machine in this process, beside mlx-lm, and write one JSON file. The flags "
    "above do not apply, except --json.",
)


@takes(*_OF_A_SERVER, JSON, _OF_THE_REPORT)
def bench(args: Namespace) -> int:
    """Prints a line for each number of requests at a time. The exit status is 1 if a request failed. With --report, see
    `_report`.

    Raises:
        ConfigError: a flag has no effect; see also `Client`.
        ParaLLMError: see `Client`; or the first request failed.
    """
    if args.report is not None:
        return _report(args)
    for flag in ("--model-path", "--sizes", "--minutes"):
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            raise ConfigError(f"{flag} belongs to --report FILE: add that, or leave {flag} out")
    client = Client(args)
    levels = asyncio.run(_levels(client, args))
    setting = {"url": client.base, **{name: getattr(args, name) for name in ("prompt_words", "max_tokens", "model")}}
    data = [{**asdict(level), "tokens_per_second": level.tokens_per_second} for level in levels]
    show(args, {**setting, "levels": data}, "\n".join((client.base, *_lines(levels))))
    return int(any(level.failed for level in levels))


# -- a server --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """One request that was answered. Times are in seconds since it was sent.

    Attributes:
        first_s: until the first token.
        seconds: until the last one.
        counted: whether the server said how many tokens there were; else each chunk counts as one.
    """

    first_s: float
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    counted: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 95th percentile of a time in seconds."""

    median: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are no values."""
        if not values:
            return None
        parts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else [values[0]] * 19
        return cls(parts[9], parts[18])


@dataclass(frozen=True, slots=True)
class Level:
    """What a number of requests at a time gave.

    Attributes:
        seconds: from the first request to the end of the last answer.
        errors: the different reasons why requests failed.
        first, token, whole: times to the first token, between two tokens, and of the whole answer; None if no request
            was answered, or if no answer had two tokens.
    """

    concurrency: int
    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    counted: bool
    errors: tuple[str, ...]
    first: Spread | None
    token: Spread | None
    whole: Spread | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests together."""
        return self.completion_tokens / self.seconds


async def _levels(client: Client, args: Namespace) -> list[Level]:
    options: dict[str, Any] = {"temperature": 0, "stream_options": {"include_usage": True}}
    if args.ignore_eos:
        options["ignore_eos"] = True
    short = {**options, "max_tokens": min(args.max_tokens, _WARM_UP_TOKENS)}
    warm_up = await _measure(client, args.model, short, args.prompt_words, 1, len(args.model))
    if warm_up.failed:
        return [warm_up]
    options["max_tokens"] = args.max_tokens
    return [
        await _measure(client, args.model, options, args.prompt_words, number, args.requests or 4 * number)
        for number in args.concurrency
    ]


async def _measure(
    client: Client, models: Sequence[str | None], options: Mapping[str, Any], words: int, concurrency: int, count: int
) -> Level:
    """Sends `count` requests, `concurrency` at a time. No two calls send the same prompt, so that no server has one in
    its prefix cache. `models`: names that the requests have in turn.

    Raises:
        ConfigError: the server refuses the requests: their key, or their Host header.
    """
    call, numbers = secrets.token_hex(8), iter(range(count))
    answers: list[LoadAnswer] = []
    errors: list[str] = []

    async def worker(http: httpx.AsyncClient) -> None:
        for number in numbers:
            model, rng = models[number % len(models)], random.Random(f"{call} {number}")
            prompt = " ".join(rng.choice(_WORDS) for _ in range(words))  # most words are one token
            body = {**options, **({"model": model} if model else {}), "messages": [{"role": "user", "content": prompt}]}
            try:
                answers.append(await _answer(client, http, body))
            except ConfigError:
                raise
            except ParaLLMError as error:
                errors.append(str(error))

    begun = time.perf_counter()
    async with client.streaming(concurrency) as http:
        await asyncio.gather(*(worker(http) for _ in range(concurrency)))
    return Level(
        concurrency,
        count,
        len(errors),
        time.perf_counter() - begun,
        sum(each.prompt_tokens for each in answers),
        sum(each.completion_tokens for each in answers),
        all(each.counted for each in answers),
        tuple(dict.fromkeys(errors)),
        Spread.of([each.first_s for each in answers]),
        Spread.of(
            [(one.seconds - one.first_s) / (one.completion_tokens - 1) for one in answers if one.completion_tokens > 1]
        ),
        Spread.of([each.seconds for each in answers]),
    )


async def _answer(client: Client, http: httpx.AsyncClient, body: Mapping[str, Any]) -> LoadAnswer:
    begun = time.perf_counter()
    times, usage = [], None
    async for chunk in client.stream_chat(http, body):
        with client.reading():
            usage = chunk.get("usage") or usage
            deltas = [choice["delta"] for choice in chunk.get("choices") or ()]
        if any(delta.get(name) for delta in deltas for name in ("content", "reasoning_content", "tool_calls")):
            times.append(time.perf_counter() - begun)
    if not times:
        raise ParaLLMError("an answer has no text")
    tokens = len(times) if usage is None else usage["completion_tokens"]
    return LoadAnswer(times[0], times[-1], usage["prompt_tokens"] if usage else 0, tokens, usage is not None)


def _lines(levels: Sequence[Level]) -> Iterator[str]:
    yield table([_COLUMNS, *map(_row, levels)])
    if not all(level.counted for level in levels):
        yield "the server counts no tokens: each chunk is counted as one"
    yield from dict.fromkeys(f"failed: {error}" for level in levels for error in level.errors)


def _row(level: Level) -> tuple[object, ...]:
    answered = max(1, level.requests - level.failed)
    return (
        *(level.concurrency, level.requests, level.failed),
        f"{level.tokens_per_second:.1f}",
        *(f"{tokens / answered:.0f}" for tokens in (level.prompt_tokens, level.completion_tokens)),
        *_milliseconds(level.first),
        *_milliseconds(level.token),
        None if level.whole is None else f"{level.whole.median:.2f}",
    )


def _milliseconds(spread: Spread | None) -> tuple[str | None, str | None]:
    return (None, None) if spread is None else (f"{1000 * spread.median:.0f}", f"{1000 * spread.p95:.0f}")


# -- this machine ----------------------------------------------------------------------------------


def _report(args: Namespace) -> int:
    """Measures this machine and writes the report. The exit status is 0, 1 if a section failed, or as a shell has it
    after the signal that ended the run: 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ConfigError: a flag of the measurement of a server is given.
        ModelNotFoundError, StorageError: see `bench.run.run`.
    """
    of_a_server = Parser(lambda parser: [add(parser) for add in _OF_A_SERVER])
    for name, default in vars(of_a_server.parse_args([])).items():
        if getattr(args, name) != default:
            flag = "--no-ignore-eos" if name == "ignore_eos" else "--" + name.replace("_", "-")
            hint = "; to choose the model, pass --model-path" if name == "model" else ""
            raise ConfigError(f"--report measures this machine without a server: leave out {flag}{hint}")
    from mlx_parallm.bench.run import run

    shown = (show_nothing, show_nothing) if args.json else (_show_section, show_result)
    report = run(args.model_path, args.sizes, 60.0 * (args.minutes or _MINUTES), args.report, *shown)
    ended = f"interrupted by {report.interrupted}; " if report.interrupted else ""
    text = f"\n{ended}the report is in {args.report}; it has no paths and no names of yours"
    show(args, report.as_json(), text)
    if report.interrupted:
        return 128 + signal.Signals[report.interrupted]
    return 0 if report.passed else 1


def _show_section(section: ReportSection) -> None:
    """When it begins, its name and limit; when it has ended, its figures."""
    from mlx_parallm.bench.report import Status

    if section.status is Status.RUNNING:
        print(f"\n{section.name}, at most {section.limit_s:.0f} s", flush=True)
        return
    print("\n".join(_ended(section)), flush=True)


def _ended(section: ReportSection) -> Iterator[str]:
    if section.figures:
        columns = ("tokens/s, medians", "here", "beside", "ratio", "lowest to highest")
        yield table([columns, *(_cells(figure.as_json()) for figure in section.figures)])
        yield from dict.fromkeys(f"beside: {figure.beside}" for figure in section.figures)
    yield from _facts(section)
    if section.problem:
        yield section.problem
    cut, figures = len(section.cut), len(section.figures)
    missing = f"; {cut} of {figures} figures lack rounds, see `cut` in the file" if cut else ""
    yield f"{section.status.value} after {section.seconds:.0f} s{missing}"


def _facts(section: ReportSection) -> Iterator[str]:
    facts = section.facts
    if "ahead" in facts:
        ahead, apart = (f"{facts[name] / 2**20:.1f} MiB" for name in ("ahead", "apart"))
        yield f"a step takes {ahead} besides what is held, {apart} without lookahead"
    if "products_s" in facts:
        yield f"reads {facts['read_bytes_per_s'] / 1e9:.0f} GB/s; a launch takes {1e6 * facts['launch_s']:.1f} us"
        one = facts["products_s"]["1"]
        times = ", ".join(f"{rows}: {seconds / one:.2f}" for rows, seconds in facts["products_s"].items())
        yield f"a product takes, by rows, times that of one row: {times}"
        names = ("dense", "by_blocks", "kernel")
        rows = zip(*(facts["attention"][name].items() for name in names if facts["attention"][name]), strict=True)
        lines = [(cells[0][0], *(f"{milliseconds:.2f}" for _, milliseconds in cells)) for cells in rows]
        used = [name.replace("_", " ") for name in names if facts["attention"][name]]
        yield table([("attention, ms a layer", *used), *lines])
    slow = [name for name in ("on_battery", "low_power", "hot") if section.state.get(name)]
    if slow:
        yield f"the machine may be slowed down: {', '.join(slow).replace('_', ' ')}"


def _cells(figure: dict[str, Any]) -> tuple[str | None, ...]:
    ratio = figure["ratio"]
    if ratio is None:
        return (figure["name"], *[None] * 4)
    rates = (f"{figure[side]:,.0f}" for side in ("ours", "other"))
    return (figure["name"], *rates, f"{ratio['median']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}")
