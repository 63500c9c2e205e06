"""Averages of adapters that the server has: made, evaluated, saved and published as versions of a name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlx_parallm.adapters.average import Average, average
from mlx_parallm.adapters.weights import AdapterWeights, VersionInfo
from mlx_parallm.app.build import Served
from mlx_parallm.config import Config
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef, AdapterText, check_name
from mlx_parallm.core.json_values import ANSWER
from mlx_parallm.errors import ConfigError, ConflictError, InvalidRequestError
from mlx_parallm.rl.evaluation import EvaluationError
from mlx_parallm.rl.status import EvaluationResult
from mlx_parallm.rl.updates.reports import Refusal, refusal_of_evaluation

if TYPE_CHECKING:
    from mlx_parallm.adapters.registry import AdapterRegistry
    from mlx_parallm.rl.service import TrainingService

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AverageSpec:
    """Which average to make. `weights` and `rank` as in `adapters.average.average`.

    `adapters`: selectors of the versions. `name`: the adapter that the average becomes a version of.
    """

    adapters: Sequence[str]
    name: str
    weights: Sequence[float] | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class AverageCard:
    """An average that was made."""

    __pydantic_config__ = ANSWER

    status: Literal["published", "held"]
    """`held`: it does not go live, and nothing of it is kept."""
    reason: str
    """Why it was held; empty if it is live."""
    adapter: AdapterText | None
    """The version that is live now; null if it was held."""
    adapters: Sequence[AdapterText]
    """The versions that were averaged."""
    rank: int
    """Rank of the average."""
    full_rank: int
    """The rank at which it would be exact."""
    error: float
    """The part of the mean's Frobenius norm that the rank loses, 0 to 1."""
    worst: str
    """The linear that loses the largest part."""
    worst_error: float
    """The part that it loses, 0 to 1."""
    evaluation: EvaluationResult | None
    """Its mean reward on the held-out tasks; null if the server does not evaluate versions, or if that failed."""
    checkpoint: str | None
    """Its checkpoint; null if it was held."""


class Averages:
    """Makes averages, one at a time. Used on the event loop's thread only.

    An average goes live when it is evaluated, if versions are evaluated, and is in a checkpoint. Until then no name
    means it, and a request that fails or is cancelled leaves nothing of it.

    `max_rank`: the largest rank that can be served.
    """

    def __init__(self, training: TrainingService, registry: AdapterRegistry, max_rank: int) -> None:
        self._training, self._registry, self._max_rank = training, registry, max_rank
        self._adapters, self._evaluator = training.parts.adapters, training.parts.evaluator
        self._one_at_a_time = asyncio.Lock()

    async def average(self, spec: AverageSpec) -> AverageCard:
        """Makes an average, evaluates it if versions are evaluated, saves it as a checkpoint and makes it live, unless
        it is held back.

        Raises:
            UnknownModelError: there is no such adapter version.
            InvalidRequestError: weights, rank or name cannot be used, or one of the adapters is the base model.
            ConflictError: the name is that of an adapter in training.
            AdapterFileError: an adapter's files have changed, or the mean is too large for float32.
            StorageError: it could not be saved, so it is not live.
        """
        check_name(spec.name, "lora_adapter")
        if self._training.has_adapter(spec.name):
            raise ConflictError(
                f"lora_adapter: {spec.name!r} is in training, which makes its versions; give the average another name",
                param="lora_adapter",
            )
        async with self._one_at_a_time:
            members = [await self._member(selector) for selector in spec.adapters]
            mean = await asyncio.to_thread(self._mean, [weights for _, weights in members], spec)
            card = await self._publish(spec.name, [ref for ref, _ in members], mean)
            self._report(spec.name, card)
            return card

    async def _member(self, selector: str) -> tuple[AdapterRef, AdapterWeights]:
        with self._adapters.lease(selector) as ref:
            if ref == BASE_ADAPTER:
                raise InvalidRequestError("adapters: the base model is no adapter; leave it out.", param="adapters")
            with self._registry.lease(str(ref)) as version:
                return ref, await self._adapters.weights(version)

    def _mean(self, members: Sequence[AdapterWeights], spec: AverageSpec) -> Average:
        try:
            mean = average(members, spec.weights, spec.rank)
        except ConfigError as error:  # its messages begin with the flag of the command
            text = str(error).removeprefix("--")
            name = text.partition(":")[0]
            raise InvalidRequestError(text, name if name in ("weights", "rank") else "adapters") from error
        if mean.weights.rank > self._max_rank:
            raise InvalidRequestError(
                f"rank: {mean.weights.rank} is over --max-lora-rank {self._max_rank}: give a smaller rank, or start "
                "the server with a larger one",
                "rank",
            )
        return mean

    async def _publish(self, name: str, members: Sequence[AdapterRef], mean: Average) -> AverageCard:
        info = VersionInfo.of(mean.weights)
        version = await self._adapters.publish(name, mean.weights, info, goes_live=False)
        live, checkpoint = None, None
        try:
            evaluation, refusal = await self._judge(version.ref)
            if refusal is None:
                metrics = {} if evaluation is None else evaluation.metrics
                card = await self._adapters.save_checkpoint(str(version.ref), None, (), metrics)
                await self._adapters.flip(version.ref)
                live, checkpoint = version.ref, card.name
        finally:
            if live is None:
                self._adapters.discard(version.ref)
        return AverageCard(
            status="held" if live is None else "published",
            reason="" if refusal is None else refusal.reason,
            adapter=live,
            adapters=members,
            rank=mean.weights.rank,
            full_rank=mean.full_rank,
            error=mean.error,
            worst=mean.worst,
            worst_error=mean.reductions[mean.worst].error,
            evaluation=evaluation,
            checkpoint=checkpoint,
        )

    async def _judge(self, ref: AdapterRef) -> tuple[EvaluationResult | None, Refusal | None]:
        """The evaluation of the average, and why it must not go live. An average whose evaluation fails does not."""
        if self._evaluator is None:
            return None, None
        try:
            with self._adapters.lease(str(ref)):
                result = await self._evaluator.evaluate(ref, 0)
        except EvaluationError as error:
            _log.warning("the evaluation of %s failed: %s", ref, error)
            return None, Refusal("evaluation", f"the evaluation failed: {error}")
        return result, refusal_of_evaluation(result, self._training.parts.config.gate.eval_floor)

    def _report(self, name: str, card: AverageCard) -> None:
        self._training.emit(
            "averaged",
            adapter=name,
            adapters=[str(ref) for ref in card.adapters],
            version=None if card.adapter is None else str(card.adapter),
            reason=card.reason,
            checkpoint=card.checkpoint,
            metrics={} if card.evaluation is None else dict(card.evaluation.metrics),
        )


def serve(config: Config, served: Served, training: TrainingService) -> Averages:
    """What requests for averages ask."""
    return Averages(training, served.known.registry, served.known.library.max_rank)
