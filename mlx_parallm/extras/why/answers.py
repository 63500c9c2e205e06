"""Answers: finds the samples that pushed an answer most."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.json_values import fields_of
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import (
    AdapterFileError,
    ConflictError,
    InvalidRequestError,
    UnknownModelError,
    UnknownTrajectoryError,
    shown,
)
from mlx_parallm.extras.why.cards import UpdatePush, WhyAnswer, WhyPush
from mlx_parallm.extras.why.influence import Push, Pushes, Term, Weights, influences
from mlx_parallm.extras.why.past import PastSample
from mlx_parallm.rl.objectives import data_of
from mlx_parallm.rl.trajectories import Episode, Turn
from mlx_parallm.train.data import Datum, UpdateSettings
from mlx_parallm.train.policy import PolicySnapshot, PolicyState

if TYPE_CHECKING:
    from mlx_parallm.extras.why.service import History, Why


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """Which answer is asked about, and how.

    Attributes:
        trajectory_id: of a collected answer; empty: `given` is asked about, as an answer of `version`.
        samples: most samples that are looked at.
        top: most samples that are shown on either side.
        ranked_by: `cosine` or `score`.
    """

    trajectory_id: str = ""
    given: GivenTrajectory | None = None
    version: str = ""
    samples: int = 256
    top: int = 5
    ranked_by: str = "cosine"


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample that may have pushed the answer."""

    update: int
    sample: PastSample
    term: Term


@dataclass(slots=True)
class _Count:
    """Samples of a version, and those of them that the reader may not read."""

    all: int = 0
    unreadable: int = 0


class Answers:
    """Finds what pushed answers, one at a time. Its passes share the device time of training with updates. Event loop's
    thread only."""

    def __init__(self, why: Why) -> None:
        self._why, self._training, self._parts = why, why.training, why.training.parts
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, spec: AnswerSpec, reader: Reader) -> WhyAnswer:
        """The samples that pushed an answer most. If the caller is cancelled, the rest is given up.

        Raises:
            UnknownTrajectoryError: there is no such answer, or the reader may not read it.
            UnknownModelError: there is no such version, or the reader does not see it.
            InvalidRequestError: the version of the answer is not known, or is the base model.
            ConflictError: another answer is being looked at; the version has no samples that are known; or no weights
                of the adapter are here.
            ConfigError: the journal is damaged.
            StepFailedError: a pass failed on the device.
        """
        if self._one_at_a_time.locked():
            raise ConflictError("Another answer is being looked at; wait until that has ended.")
        async with self._one_at_a_time:
            answer, version = await self._asked(spec, reader)
            history = await self._why.history(version, reader)
            samples, count, problems = await self._largest(history, spec.samples, reader)
            if not samples:
                raise ConflictError(
                    "; ".join([f"{history.version} has learnt from nothing that is known", *problems]) + "."
                )
            weights, where = await self._weights(history)
            learner, terms = self._parts.learner, [each.term for each in samples]
            pushes = await learner.run(influences(learner.trainer, weights, _datum(answer), terms))
            ranked = await asyncio.to_thread(self._ranked, spec, reader, samples, pushes)
            return WhyAnswer(
                version=history.version,
                weights=where,
                preconditioned=pushes.preconditioned,
                logprob=pushes.logprob,
                samples_total=count.all,
                samples_unreadable=count.unreadable,
                samples_looked_at=len(samples),
                problems=problems,
                **ranked,
            )

    async def _asked(self, spec: AnswerSpec, reader: Reader) -> tuple[Turn, str]:
        """The answer, and the version that gave it."""
        if spec.given is not None:
            return spec.given, spec.version
        fate = await self._parts.journal.fate(spec.trajectory_id)
        if fate is None or not (reader.sees(fate.adapter) and reader.may_read(fate.trajectory.owner)):
            raise UnknownTrajectoryError(f"No collected answer has the id {shown(spec.trajectory_id)}.")
        version = fate.trajectory.adapter
        if version in (None, BASE_ADAPTER):
            said = "It is not known which version gave this answer" if version is None else "The base model gave it"
            raise InvalidRequestError(
                f"trajectory_id: {said}, so no update is known to have pushed it.", "trajectory_id"
            )
        return fate.trajectory, str(version)

    async def _largest(self, history: History, most: int, reader: Reader) -> tuple[list[_Sample], _Count, list[str]]:
        """The samples of a version with the largest shares of the longest steps, newest first if they are equal; how
        many it has; and what of its history is not known. Those that the reader may not read are left out, because
        products with answers of its choice would tell what is in them."""
        found: list[tuple[float, int, int, _Sample]] = []
        count, unknown = _Count(), list[int]()
        configured = UpdateSettings.of(self._parts.config)
        async for past in self._why.past(history):
            number = past.change.number
            unknown += [number] if past.problem else []
            for sample, share, term in past.terms(configured):
                count.all += 1
                if not sample.is_readable(reader):
                    count.unreadable += 1
                    continue
                entry = (share * past.learning_rate, number, count.all, _Sample(number, sample, term))
                if len(found) < most:
                    heapq.heappush(found, entry)
                else:
                    heapq.heappushpop(found, entry)
        return [entry[-1] for entry in sorted(found, reverse=True)], count, _problems(history, unknown)

    async def _weights(self, history: History) -> tuple[Weights, str]:
        """The weights of a version or, if they are not here any more, those of its adapter that are; and whose they
        are. The optimizer's state is that of the same moment or, if that is not kept, of the policy in training."""
        name, version, live, latest = history.adapter, history.version, None, ""
        if self._training.has_adapter(name):
            loop = self._training.loop(name)
            await loop.settled()
            live = self._parts.learner.state(name)
            latest = name if loop.training.unpublished else str(loop.training.versions.latest)
        if live is not None and version in (name, latest):
            return Weights(live), version
        cards = self._parts.checkpoints.cards(name)[::-1]
        own = [card for card in cards if str(card.adapter) == version]
        if (found := await self._saved(own, live)) is not None:
            return found
        if (served := await self._served(version)) is not None:
            policy = await self._parts.learner.loaded(served)
            return Weights(policy.state, live, policy), version
        if live is not None:
            return Weights(live), f"the policy of {name} in training, because those of {version} are not here any more"
        if (found := await self._saved(cards, None)) is not None:
            return found
        raise ConflictError(f"No weights of {version} are here, and {name} is not in training.")

    async def _saved(
        self, cards: Sequence[CheckpointCard], optimizer: PolicyState | None
    ) -> tuple[Weights, str] | None:
        """The weights of the first checkpoint that can be read; None: none can."""
        for card in cards:
            with suppress(AdapterFileError, UnknownModelError):  # damaged, or pruned meanwhile
                _, snapshot = await self._parts.checkpoints.load(card.adapter.name, card.name)
                policy = await self._parts.learner.loaded(snapshot)
                return Weights(policy.state, optimizer, policy), f"{card.adapter}, from {card.name}"
        return None

    async def _served(self, version: str) -> PolicySnapshot | None:
        """A policy of the weights from which a version is served; None: they are not here."""
        if self._parts.policy_of is None:
            return None
        try:
            return await self._parts.policy_of(_ref(version))
        except (AdapterFileError, ConflictError, UnknownModelError):
            return None

    def _ranked(self, spec: AnswerSpec, reader: Reader, samples: Sequence[_Sample], pushes: Pushes) -> dict[str, Any]:
        """The ranks of the samples, and the sums of updates. Call it in a worker thread, because texts are decoded."""
        of_updates: dict[int, list[float]] = {}
        for each, push in zip(samples, pushes.pushes, strict=True):
            of_updates.setdefault(each.update, []).append(push.score)
        pairs = list(zip(samples, pushes.pushes, strict=True))
        pairs.sort(key=lambda pair: pair[1].cosine if spec.ranked_by == "cosine" else pair[1].score)
        towards, away = pairs[::-1][: spec.top], pairs[: spec.top]

        def shown_as(each: _Sample, push: Push) -> WhyPush:
            sample = fields_of(self._why.sample(each.sample, reader))
            return WhyPush(**sample, update=each.update, score=push.score, cosine=push.cosine)

        return {
            "ranked_by": spec.ranked_by,
            "towards": [shown_as(*pair) for pair in towards if pair[1].score > 0],
            "away": [shown_as(*pair) for pair in away if pair[1].score < 0],
            "updates": [
                UpdatePush(number, sum(scores), len(scores)) for number, scores in sorted(of_updates.items())[::-1]
            ],
        }


def _problems(history: History, unknown: Sequence[int]) -> list[str]:
    """What of a version's history is not known. `unknown`: the updates whose samples are not."""
    problems = []
    if unknown:
        problems.append(
            f"the trajectories of {len(unknown)} updates, up to number {unknown[-1]}, are not here any more"
        )
    if (missing := history.found.missing) is not None:
        problems.append(f"the changes {missing[0]} to {missing[1]} of {history.adapter} are missing")
    if start := history.found.start:
        problems.append(f"no update here has made {start}, with which it begins")
    return problems


def _datum(answer: Turn) -> Datum:
    """The tokens of an answer that were sampled, each with the weight 1."""
    (datum,) = data_of(Episode([answer]), [[0.0] * len(answer.completion_ids)], 0, True, False)
    return replace(datum, sampling_logprobs=())


def _ref(version: str) -> AdapterRef:
    name, _, number = version.partition("@")
    return AdapterRef(name, int(number))
