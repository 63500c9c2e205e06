"""OutsideEngine: takes the samples of a training run from a server of its own, while training happens here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from statistics import fmean

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import Event, FinishReason, GenerationRequest, RequestFinished, SequenceOutput
from mlx_parallm.errors import ConfigError, EngineError
from mlx_parallm.extras.engines.api import Draw, EngineApi, Sample
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.sync import AdapterSync

_TRIED_SAMPLES, _TRIED_TOKENS = 2, 8
_MOST_APART = 1.0
"""Largest mean difference, in nats, between a server's logprobs and those of the model here. Quantization and other
precisions make less of one, and another model makes more."""

NEUTRAL = AdapterRef("neutral", 0)
"""An adapter that changes nothing, in place of the base model at the start, to see whether the server takes a LoRA."""

Score = Callable[[Sequence[int], Sequence[int], AdapterRef], Awaitable[Sequence[float]]]
"""(prompt, completion, version) → the logprob of each token of the completion here, at temperature 1."""


class OutsideEngine:
    """Implements `InferenceEngine`.

    Args:
        text_of: (prompt, completion) → the text of the completion.
        eos_ids: the tokens that end an answer.
        vocab_size: ids of tokens are below it.
        trial_prompt: ids of a short prompt.
        score: what the server's logprobs are compared with.
    """

    def __init__(
        self,
        server: EngineServer,
        api: EngineApi,
        sync: AdapterSync,
        text_of: Callable[[Sequence[int], Sequence[int]], str],
        eos_ids: frozenset[int],
        vocab_size: int,
        trial_prompt: Sequence[int],
        score: Score,
    ) -> None:
        self._server = server
        self._api = api
        self._sync = sync
        self._text_of = text_of
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._trial_prompt = tuple(trial_prompt)
        self._score = score

    async def open(self, adapter: AdapterRef) -> None:
        """See `InferenceEngine.open`. Makes the server take the adapter and sample two short answers, and compares
        their logprobs with those of the model here."""
        try:
            await self._api.connect()
            draw = Draw(self._trial_prompt, _TRIED_SAMPLES, _TRIED_TOKENS, temperature=1.0, seed=0)
            apart = []
            for sample in await self._draw(draw, NEUTRAL if adapter == BASE_ADAPTER else adapter):
                own = await self._score(draw.prompt_ids, sample.token_ids, adapter)
                apart += [abs(theirs - ours) for theirs, ours in zip(sample.logprobs, own, strict=True)]
        except EngineError as error:
            raise ConfigError(f"inference.engine: {error}") from error
        if fmean(apart) > _MOST_APART:
            raise ConfigError(
                f"inference.engine: the logprobs of the {self._server.name} engine are {fmean(apart):.2f} nats away "
                f"from those of the model that is trained, on average over {len(apart)} tokens: serve the same base "
                "model there"
            )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """See `InferenceEngine.generate`. The request has one prompt, and no filters."""
        (prompt,) = request.prompts
        arrived, sampling = time.monotonic(), request.sampling
        draw = Draw(prompt, request.n, request.stopping.max_tokens, sampling.temperature, sampling.seed)
        samples = await self._draw(draw, request.adapter)
        for index, sample in enumerate(samples):
            yield SequenceOutput(
                index,
                sample.token_ids,
                self._text_of(prompt, sample.token_ids),
                finish_reason=self._reason(sample),
                sampling_logprobs=sample.logprobs,
            )
        drawn = sum(len(sample.token_ids) for sample in samples)
        ended = time.monotonic()
        yield RequestFinished(len(prompt), drawn, arrived, arrived, ended, ended)

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        try:
            await self._sync.close()
        finally:
            await self._server.close()

    async def _draw(self, draw: Draw, adapter: AdapterRef) -> list[Sample]:
        """Raises EngineError: the server failed, or an answer has a token that is not in the vocabulary, or ended
        without its end-of-sequence token."""
        async with self._sync.use(adapter) as sent:
            samples = await self._api.draw(draw, sent)
        for sample in samples:
            if (largest := max(sample.token_ids)) >= self._vocab_size:
                raise self._server.unusable(
                    f"drew token {largest}, which the model here does not have: serve the same base model there"
                )
            if self._reason(sample) is FinishReason.LENGTH and len(sample.token_ids) != draw.max_tokens:
                raise self._server.unusable(
                    f"ended an answer after {len(sample.token_ids)} of {draw.max_tokens} tokens without one of the "
                    f"end-of-sequence tokens {sorted(self._eos_ids)}"
                )
        return samples

    def _reason(self, sample: Sample) -> FinishReason:
        return FinishReason.STOP if sample.token_ids[-1] in self._eos_ids else FinishReason.LENGTH
