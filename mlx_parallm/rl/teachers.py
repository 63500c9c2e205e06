"""Teacher: the policy that distillation imitates, and its log-probabilities of the tokens that the student sampled.

sample of the student   prompt | answer
what the teacher reads  its own text, prompt | answer ─▶ logprobs of the answer
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.config import ResolvedLoss
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.requests import GenerationRequest, PromptScored, SamplingParams, StopParams, WorkClass
from mlx_parallm.errors import EngineError, ParaLLMError
from mlx_parallm.rl.objectives import TeacherLogprobs
from mlx_parallm.rl.rollouts.answers import events_of
from mlx_parallm.train.data import Datum, UpdateBatch

_AT_ONCE = 8
"""Samples that the teacher reads at the same time."""

_log = logging.getLogger(__name__)

Score = Callable[[tuple[int, ...], int], Awaitable[Sequence[float | None]]]
"""Of a sequence and the number of a token: the logprob of each token from that one on at temperature 1, in nats. There
may be values of the tokens before it, or None."""


class Teacher:
    """Scores samples by a teacher. A sample that the teacher cannot score is left out, and the others are kept.

    Args:
        prompt_ids: what only the teacher reads, before each sample.
        bos_id: a sample that begins with this token keeps it in front. None: the tokenizer has none.
        timeout_s: the longest that one sample may take, in seconds. When one takes longer, those that were not asked
            about yet are left out too, so a teacher that hangs delays an update once and not once for each sample.
        close: called when training ends.
    """

    def __init__(
        self,
        score: Score,
        timeout_s: float,
        prompt_ids: Sequence[int] = (),
        bos_id: int | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._score = score
        self._timeout_s = timeout_s
        self._prompt_ids = tuple(prompt_ids)
        self._bos_id = bos_id
        self._close = close
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def close(self) -> None:
        if self._close is not None:
            await self._close()

    async def logprobs(self, samples: Sequence[Datum]) -> tuple[TeacherLogprobs, str]:
        """The teacher's logprobs of the samples; and why one of them is left out, or an empty string."""
        too_late = ""

        async def ask(sample: Datum) -> tuple[float, ...] | str:
            nonlocal too_late
            async with self._room:
                if too_late:
                    return too_late
                try:
                    async with asyncio.timeout(self._timeout_s):
                        return await self._logprobs(sample)
                except TimeoutError:
                    limit = f"{self._timeout_s:g} s; see rl_training.teacher.timeout_s"
                    too_late = f"the teacher did not answer within {limit}"
                    return too_late
                except ParaLLMError as error:
                    return f"the teacher failed: {error}"

        results = await asyncio.gather(*map(ask, samples))
        failed = [result for result in results if isinstance(result, str)]
        if failed:
            _log.warning("%d of %d samples are left out: %s", len(failed), len(samples), failed[0])
        return tuple(() if isinstance(result, str) else result for result in results), failed[0] if failed else ""

    async def _logprobs(self, sample: Datum) -> tuple[float, ...] | str:
        """Those of one sample, or an error message. Raises ParaLLMError: the teacher failed."""
        start = 1 if self._bos_id is not None and sample.token_ids[0] == self._bos_id else 0
        ids = (*sample.token_ids[:start], *self._prompt_ids, *sample.token_ids[start:])
        wanted = [at + len(self._prompt_ids) for at in sample.trained()]
        scores = await self._score(ids, wanted[0])
        values = [scores[at] for at in wanted] if len(scores) == len(ids) else []
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if len(finite) < len(wanted):
            return "the teacher gave no log-probability for some of the tokens"
        return tuple(finite)


async def logprobs_for(
    teacher: Teacher | None, batch: UpdateBatch, configured: ResolvedLoss
) -> tuple[TeacherLogprobs | None, str]:
    """See `Teacher.logprobs`. None: the loss of this batch reads none."""
    if teacher is None or not (batch.loss or configured).reads_teacher:
        return None, ""
    return await teacher.logprobs(batch.samples)


def taught(batch: UpdateBatch, logprobs: TeacherLogprobs | None) -> UpdateBatch:
    """The batch with the teacher's logprobs, without the samples that it could not score. The step is smaller by their
    share. `logprobs` None: the batch as it is.

    Raises:
        EngineError: the logprobs are not of these samples.
    """
    if logprobs is None:
        return batch
    try:
        pairs = zip(batch.samples, logprobs, strict=True)
        samples = tuple(sample.with_teacher(values) for sample, values in pairs if values)
    except ValueError as error:
        raise EngineError("under the present settings it has other samples than the teacher has scored") from error
    return replace(batch, samples=samples, step_scale=batch.step_scale * (len(samples) / len(batch.samples)))


def engine_score(engine: EngineClient, adapters: AdapterService, adapter: str | None) -> Score:
    """Scores by an adapter of this server; None is the base model. What the prefix cache has is not read again."""
    numbers = itertools.count()

    async def score(ids: tuple[int, ...], first: int) -> Sequence[float | None]:
        with adapters.lease(adapter or BASE_ADAPTER.name) as version:
            request = GenerationRequest(
                request_id=f"teacher-{next(numbers)}",
                prompts=(ids,),
                sampling=SamplingParams(temperature=0.0),
                stopping=StopParams(1),
                prompt_logprobs=0,
                scored_from=first,
                adapter=version,
                work_class=WorkClass.TRAINING,
            )
            scored: Sequence[float | None] = ()
            async for event in events_of(engine.generate(request)):
                if isinstance(event, PromptScored):
                    scored = [None if each is None else each.logprob for each in event.logprobs]
            return scored

    return score
