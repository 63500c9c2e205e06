"""`POST /v1/completions`: OpenAI's legacy completions, with vLLM's extensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mlx_parallm.server.wire.base import WireOutput, refused
from mlx_parallm.server.wire.common import (
    INT32_MAX,
    FinishReasonText,
    GenerationBody,
    PromptLogprobs,
    TopLogprobs,
    Usage,
)
from mlx_parallm.server.wire.fields import Prompts


class CompletionBody(GenerationBody):
    """`logprobs` 0 reports the drawn token alone. `max_tokens` 0 scores the prompt, so it needs something to score."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.UNSUPPORTED,
        "best_of": (1,),
        "suffix": ("",),
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    logprobs: TopLogprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refused("0 scores a prompt: it needs echo or prompt_logprobs", "max_tokens")
        if self.max_tokens == 0 and self.collect_trajectory:
            raise refused("0 draws nothing that could be collected", "max_tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise refused("not available with stream; use echo and logprobs", "prompt_logprobs")
        return self


class CompletionLogprobs(WireOutput):
    """Four lists of one length, a token each. A first prompt token has no context, hence no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(WireOutput):
    """`stop_reason`: the stop string that ended it, when one did."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonText | None
    stop_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(WireOutput):
    """The whole answer, and also each chunk of a stream.

    `trajectory_ids`, in order of choice, when collected; in a stream they come with the last `finish_reason`.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metadata: dict[str, str] | None = None
    lora_adapter: str | None = None
    trajectory_ids: list[str] | None = None
