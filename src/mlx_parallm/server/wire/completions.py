"""`POST /v1/completions`: OpenAI's legacy completions, with vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from mlx_parallm.server.wire.base import WireOutput, refused
from mlx_parallm.server.wire.common import (
    INT32_MAX,
    NO_LIMIT,
    FinishReasonText,
    GenerationBody,
    PromptLogprobs,
    TopLogprobs,
    Usage,
)
from mlx_parallm.server.wire.fields import Prompts
from mlx_parallm.server.wire.neutral import COMPLETIONS, Neutral


class CompletionBody(GenerationBody):
    """`logprobs` 0 reports the drawn token alone."""

    IGNORED: ClassVar[frozenset[str]] = GenerationBody.IGNORED | {"parallel_tool_calls"}
    NEUTRAL: ClassVar[Neutral] = COMPLETIONS

    prompt: Prompts
    """A text, token ids, or a list of either; one answer (or `n`) to each."""
    max_tokens: Annotated[int, Field(ge=NO_LIMIT, le=INT32_MAX)] | None = None
    """Tokens to draw at most. Left out: 16, or as many as fit. null or -1: all that fit. 0 scores the prompt: with
    `echo` or `prompt_logprobs`."""
    logprobs: TopLogprobs | None = None
    """Logprobs of the drawn tokens, and of so many best ones at each place."""
    echo: bool = False
    """Begins each answer with its prompt; with `logprobs` the prompt's are told too."""
    add_special_tokens: bool = True
    """Whether the tokenizer may add special tokens to a text; ids are taken as they are."""

    @model_validator(mode="wrap")
    @classmethod
    def _null_is_no_limit(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """vLLM's meaning. Everywhere else null is as if the field were left out."""
        if isinstance(data, dict) and "max_tokens" in data and data["max_tokens"] is None:
            data = {**data, "max_tokens": NO_LIMIT}
        return handler(data)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refused("0 scores a prompt: it needs echo or prompt_logprobs", "max_tokens")
        if self.max_tokens == 0 and self.collect_trajectory:
            raise refused("0 draws nothing that could be collected", "max_tokens")
        if self.stream and self.prompt_logprobs is not None:
            raise refused("not available with stream; use echo and logprobs", "prompt_logprobs")
        return self


class CompletionLogprobs(WireOutput):
    """Four lists of one length, a token each. A first prompt token has no context, hence no logprob."""

    LONG: ClassVar[bool] = True

    tokens: list[str]
    """Their texts, or `token_id:<id>`."""
    token_logprobs: list[float | None]
    """Nats, of the raw model; null for a first prompt token."""
    top_logprobs: list[dict[str, float] | None]
    """Text to logprob (nats) of the best ones and the drawn one."""
    text_offset: list[int]
    """Characters before the token."""


class CompletionChoice(WireOutput):
    """One answer, or what a chunk adds to it."""

    LONG: ClassVar[bool] = True

    index: int
    """Prompt number times `n`, plus sample number."""
    text: str
    """The answer, or what a chunk adds to it."""
    logprobs: CompletionLogprobs | None
    """Of the tokens of `text`, when asked for."""
    finish_reason: FinishReasonText | None
    """Why it ended; null while it goes on."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    token_ids: list[int] | None = None
    """Of the tokens drawn."""
    prompt_token_ids: list[int] | None = None
    """Of the prompt; in a stream with the first chunk."""
    prompt_logprobs: PromptLogprobs | None = None
    """An entry for each prompt token, by token id; null for the first."""


class Completion(WireOutput):
    """The whole answer, and also each chunk of a stream."""

    LONG: ClassVar[bool] = True

    id: str
    """Of the request; the header x-request-id has it too."""
    object: Literal["text_completion"]
    """Always the same."""
    created: int
    """Unix time, seconds."""
    model: str
    """The served model, or the adapter's name."""
    choices: list[CompletionChoice]
    """One for each answer; a chunk of a stream has the one that it adds to, or none."""
    usage: Usage | None = None
    """Tokens; in a stream as `stream_options` says."""
    metadata: dict[str, str] | None = None
    """As it was sent."""
    lora_adapter: str | None = None
    """`name@version` that served it; absent for the base."""
    trajectory_ids: list[str] | None = None
    """In order of choice, when collected; in a stream with the last `finish_reason`."""
    trajectory_warning: str | None = None
    """Why they will not be trained on: a stale version drew them, for one. Absent where they may be."""
