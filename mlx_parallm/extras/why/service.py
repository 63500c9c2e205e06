"""Why: tells what a version consists of, from the journal of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from mlx_parallm.app.build import Served
from mlx_parallm.config import Config
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import InvalidRequestError, StorageError, UnknownModelError, shown
from mlx_parallm.extras.why.answers import Answers
from mlx_parallm.extras.why.cards import KeyPart, WhySample, WhyUpdate, WhyVersion
from mlx_parallm.extras.why.past import PastSample, PastUpdate, past_updates
from mlx_parallm.rl.runs.lineage import Lineage, lineage
from mlx_parallm.rl.runs.records import LearningSettings, PolicyChange
from mlx_parallm.rl.updates.adapter_training import CHANGE
from mlx_parallm.train.data import UpdateSettings

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

MAX_SAMPLES = 1000
"""Samples of one update that are shown: those with the largest shares."""

_EXCERPT_TOKENS, _EXCERPT = 96, 160
"""Tokens that an excerpt is decoded from, and its most characters."""

_SETTINGS = TypeAdapter(LearningSettings)


@dataclass(frozen=True, slots=True)
class History:
    """What the journal says of a version.

    Attributes:
        version: as text; the adapter's name alone is the policy in training.
        found: of which updates it consists.
        changes: all of its adapter, in order.
        settings: of updates, by digest.
    """

    version: str
    adapter: str
    base_model: str
    found: Lineage
    changes: Sequence[PolicyChange]
    settings: Mapping[str, LearningSettings]


class Why:
    """Says what versions consist of. Event loop's thread only.

    `answers`: finds what pushed their answers.
    """

    def __init__(self, training: TrainingService, tokenizer: TextTokenizer) -> None:
        self.training, self._parts = training, training.parts
        self._tokenizer = tokenizer
        self.answers = Answers(self)

    async def version(self, version: str | None, number: int | None, limit: int, reader: Reader) -> WhyVersion:
        """What a version consists of.

        Args:
            version: `name@number`, or a name: its live version; None: that of the default adapter.
            number: of the one update that is wanted, with its samples; None: the newest `limit` without them.

        Raises:
            UnknownModelError: there is no such version, or the reader does not see it.
            InvalidRequestError: the version has no update of this number.
            ConfigError: the journal is damaged.
        """
        history = await self.history(version, reader)
        numbers = [change.number for change in history.found.updates]
        if number is not None and number not in numbers:
            raise InvalidRequestError(f"update: {history.version} has no update {number}.", "update")
        updates, before = list[WhyUpdate](), None
        async for past in self.past(history):
            card = _update(past, reader, before)
            if number == past.change.number:
                card = replace(card, samples=await asyncio.to_thread(self._samples, past.samples, reader))
            updates.append(card)
            before = past.settings or before
        cards = self._parts.checkpoints.cards(history.adapter)
        return WhyVersion(
            version=history.version,
            base_model=history.base_model,
            start=history.found.start,
            missing=history.found.missing or (),
            checkpoints=[card.name for card in cards if str(card.adapter) == history.version],
            updates_total=len(numbers),
            trajectories=sum(card.trajectories or 0 for card in updates),
            keys=_over_updates(updates),
            settings=_flat(before),
            updates=[card for card in reversed(updates) if number in (None, card.number)][:limit],
        )

    async def history(self, version: str | None, reader: Reader) -> History:
        """What the journal says of a version; see `version` for the argument and what it raises."""
        name, at, number = (version or self.training.default_adapter).partition("@")
        reader.named(None if version is None else name, self.training.default_adapter)
        live = self._parts.adapters.live(name)
        wanted = f"{name}@{number}" if at else str(live or name)
        with suppress(StorageError):  # what cannot be written now is not shown
            await self._parts.journal.flush()
        changes = await self._parts.journal.read(lambda file: file.changes(name)) or ()
        saved: dict[str, int] = {}
        for card in self._parts.checkpoints.cards(name):
            if CHANGE in card.metrics:
                saved.setdefault(str(card.adapter), int(card.metrics[CHANGE]))
        trained = bool(changes) or self.training.has_adapter(name)
        found = lineage(changes, None if wanted == name else wanted, saved) if trained else None
        settings = await self._parts.journal.read(lambda file: file.settings()) or {}
        base = await self._parts.journal.read(lambda file: file.base_model()) or ""
        return History(wanted, name, base, found or self._untrained(wanted), changes, settings)

    def _untrained(self, version: str) -> Lineage:
        """The lineage of a version that no update of the journal has made. Raises UnknownModelError: there is none."""
        try:
            self._parts.adapters.find(version)
        except UnknownModelError as error:
            raise UnknownModelError(
                f"version: neither this server nor the journal of its run knows {shown(version)}.", param="version"
            ) from error
        return Lineage(version)

    def past(self, history: History) -> AsyncIterator[PastUpdate]:
        """The updates of a version, in order; see `past_updates`."""
        wanted = {change.number for change in history.found.updates}
        configured = UpdateSettings.of(self._parts.config)
        return past_updates(self._parts.journal, history.changes, wanted, history.settings, configured)

    def _samples(self, samples: Sequence[PastSample], reader: Reader) -> list[WhySample]:
        largest = sorted(samples, key=lambda sample: -sample.share)[:MAX_SAMPLES]
        return [self.sample(sample, reader) for sample in largest]

    def sample(self, sample: PastSample, reader: Reader) -> WhySample:
        """A sample as the reader may see it. Call it in a worker thread, because texts are decoded."""
        readable, last = sample.is_readable(reader), sample.turns[-1]
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        versions = {str(turn.adapter) for turn in sample.turns if turn.adapter is not None}
        return WhySample(
            trajectory_id=sample.trajectory_id if readable else None,
            key=sample.owner if readable else None,
            readable=readable,
            prompt=_end(decode(last.prompt_ids[-_EXCERPT_TOKENS:])) if readable else "",
            answer=_beginning(decode(last.completion_ids[:_EXCERPT_TOKENS])) if readable else "",
            reward=sample.reward,
            advantage=sample.advantage,
            share=sample.share,
            reason=sample.reason,
            scoring_function=sample.scorer,
            versions=sorted(versions),
            sampled_at=last.created if isinstance(last, Trajectory) else None,
        )


def _beginning(text: str) -> str:
    return " ".join(text.split())[:_EXCERPT]


def _end(text: str) -> str:
    return " ".join(text.split())[-_EXCERPT:]


def _update(past: PastUpdate, reader: Reader, before: LearningSettings | None) -> WhyUpdate:
    body, samples = past.body, past.samples
    learnt = sum(not sample.reason for sample in samples)
    was, now = _flat(before), _flat(past.settings)
    signals = {group.signal for group in body.groups}
    return WhyUpdate(
        number=past.change.number,
        at=past.change.at,
        step=body.step,
        version=None if body.version is None else str(AdapterRef(past.change.adapter, body.version)),
        status=body.status,
        signal=signals.pop() if signals else Signal.REWARDS,
        learning_rate=past.learning_rate,
        reward_mean=body.metrics.get("reward_mean"),
        trajectories=None if past.problem else learnt,
        left_out=len(samples) - learnt,
        forgotten=body.forgotten,
        keys=_keys(samples, reader),
        scoring_functions=sorted({sample.scorer for sample in samples}),
        changed_settings={name: value for name, value in now.items() if was and was.get(name) != value},
        problem=past.problem,
        samples=(),
    )


def _keys(samples: Sequence[PastSample], reader: Reader) -> list[KeyPart]:
    """What each key has contributed to an update, as the reader may see it; largest share first."""
    found: dict[str | None, list[float]] = {}
    for sample in samples:
        if not sample.reason:
            found.setdefault(sample.owner if sample.is_readable(reader) else None, []).append(sample.share)
    parts = [KeyPart(key, len(shares), sum(shares)) for key, shares in found.items()]
    return sorted(parts, key=lambda part: -part.share)


def _over_updates(updates: Sequence[WhyUpdate]) -> list[KeyPart]:
    """What each key has contributed to all updates whose samples are known."""
    steps = sum(update.learning_rate for update in updates if update.keys) or 1.0
    found: dict[str | None, KeyPart] = {}
    for update in updates:
        for part in update.keys:
            known = found.get(part.key, KeyPart(part.key, 0, 0.0))
            share = known.share + part.share * update.learning_rate / steps
            found[part.key] = KeyPart(part.key, known.trajectories + part.trajectories, share)
    return sorted(found.values(), key=lambda part: -part.share)


def _flat(settings: LearningSettings | None) -> dict[str, Any]:
    """Settings by dotted name; none if they are not known."""
    return {} if settings is None else dict(_leaves("", _SETTINGS.dump_python(settings, mode="json")))


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}".removeprefix("update."), value


def serve(config: Config, served: Served, training: TrainingService) -> Why:
    """What requests about versions ask."""
    return Why(training, served.tokenizer)
