"""`/generate` as vLLM's demonstration server has it (`vllm.entrypoints.api_server`), with the fields that Atropos adds
(`example_trainer/vllm_api_server.py`, which its `VLLMServer` reads)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from mlx_parallm.core import TokenLogprob
from mlx_parallm.server.api.answer import FinishReasonText, collected_fields
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.api.logprobs import finite
from mlx_parallm.server.api.sampling_fields import sent_sampling
from mlx_parallm.server.protocols.generate.choices import WholeRequest, WholeWriter
from mlx_parallm.server.protocols.generate.schema import GenerateBody

TokenLogprobs = dict[str, float]
"""Logprobs in nats by token id. The first one is that of the token itself, the others are of the most likely tokens."""


class VLLMAnswer(WireOutput):
    """The answer to a body with `prompt`. Each list has one entry for each of the `n` answers."""

    LONG: ClassVar[bool] = True

    text: list[str]
    """The answers."""
    prompt: str
    """The text of the prompt."""
    finish_reasons: list[FinishReasonText]
    """Why each answer ended."""
    token_ids: list[list[int]]
    """The generated tokens, with the one that ended the answer."""
    prompt_token_ids: list[int]
    """The tokens of the prompt."""
    logprobs: list[list[list[TokenLogprobs]]] | None = None
    """With `logprobs`: for each answer and each of its tokens, a list of one object. It maps token ids to logprobs in
    nats, the generated token first."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With `prompt_logprobs`: for each token of the prompt, an object that maps token ids to logprobs in nats, the
    token itself first; null for the first token."""
    trajectory_ids: list[str] | None = None
    """One id for each answer, with `collect_trajectory`."""
    trajectory_warning: str | None = None
    """Why the trajectories will not be used for training."""


def vllm_completion(body: GenerateBody) -> dict[str, Any]:
    """The fields of the completion that a body with `prompt` asks for."""
    return {**sent_sampling(body), "max_tokens": body.max_tokens, "logprobs": body.logprobs}


class VLLMWriter(WholeWriter):
    """Writes a `VLLMAnswer`."""

    def _answer(self, whole: WholeRequest) -> VLLMAnswer:
        prompt = self.request.prompts[0]
        fields: dict[str, Any] = collected_fields(self.request, whole.finished)
        if self.sent.logprobs is not None:
            top = self.sent.logprobs
            fields["logprobs"] = [[[_by_id(token, top)] for token in choice.logprobs] for choice in whole.choices]
        if self.sent.prompt_logprobs is not None:
            fields["prompt_logprobs"] = list(_prompt_logprobs(whole.prompt_logprobs[0], self.sent.prompt_logprobs))
        return VLLMAnswer(
            text=[choice.text for choice in whole.choices],
            prompt=self.tokenizer.decode(prompt),
            finish_reasons=[choice.finish_reason.value for choice in whole.choices],
            token_ids=[choice.token_ids for choice in whole.choices],
            prompt_token_ids=list(prompt),
            **fields,
        )


def _by_id(token: TokenLogprob, top: int) -> TokenLogprobs:
    return {str(ranked): finite(value) for ranked, value in ((token.token_id, token.logprob), *token.top[:top])}


def _prompt_logprobs(scores: Iterable[TokenLogprob | None], top: int) -> Iterable[TokenLogprobs | None]:
    return (None if token is None else _by_id(token, top) for token in scores)
