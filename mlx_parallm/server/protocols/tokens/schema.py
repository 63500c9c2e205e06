"""The bodies and the answer of `POST /inference/v1/generate`, vLLM's token-in, token-out route (`GenerateRequest` and
`GenerateResponse` in its `entrypoints/serve/disagg/protocol.py`)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_parallm.server.api.answer import AnswerObject
from mlx_parallm.server.api.fields import FinishReasonText, Neutral, NonEmptyTokenIds, WireOutput
from mlx_parallm.server.api.generation_fields import UNSUPPORTED_OPTIONS, CollectableBody, Priority, StreamOptions
from mlx_parallm.server.api.logprobs import ChatLogprobs, PromptLogprobs
from mlx_parallm.server.api.sampling_fields import NO_LIMIT, SamplingFields, TokenLimit, TopLogprobs

MAX_REQUEST_ID = 256
WITHOUT_EFFECT = frozenset({"detokenize", "extra_args", "output_kind", "routed_experts_prompt_start"})
"""vLLM's sampling parameters that change nothing here: how outputs are batched, and what mixtures of experts report."""


class TokenSampling(SamplingFields):
    """vLLM's sampling parameters."""

    IGNORED: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"reasoning_effort"}
    NEUTRAL: ClassVar[Neutral] = {**UNSUPPORTED_OPTIONS, "flat_logprobs": (False,), "logprob_token_ids": ()}

    max_tokens: TokenLimit | None = None
    """Maximum number of tokens to generate. If it is left out, only the context limits the answer. With 0, nothing is
    generated, so `prompt_logprobs` is required."""
    logprobs: TopLogprobs | None = None
    """Return the logprobs of the generated tokens and, at each position, of this many most likely tokens: at most 20,
    unless the operator allows more with `--max-logprobs`."""


class TokensBody(CollectableBody):
    """The tokens of a prompt, and how to continue them."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"kv_transfer_params", "vllm_xargs"})
    NEUTRAL: ClassVar[Neutral] = {"content_parts": (), "features": ()}

    token_ids: NonEmptyTokenIds
    """The token ids of the prompt, used as they are."""
    sampling_params: TokenSampling = TokenSampling()
    """How to continue them."""
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID)] | None = None
    """Returned with the answer. The server's own id of the request is in the header `x-request-id`."""
    stream: bool = False
    """Whether the answer is sent as server-sent events instead of one body."""
    stream_options: StreamOptions = StreamOptions()
    """What a stream reports about usage. It has no effect without `stream`."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    return_token_ids: bool = False
    """Whether the answer has the token ids of the prompt too."""

    def for_completion(self) -> dict[str, Any]:
        """The same request as the fields of a completion."""
        sampling = self.sampling_params
        return {
            **self.sent_collection(),
            **sampling.sent_sampling(),
            "prompt": self.token_ids,
            "max_tokens": NO_LIMIT if sampling.max_tokens is None else sampling.max_tokens,
            "logprobs": sampling.logprobs,
            "priority": self.priority,
            "stream": self.stream,
            "stream_options": self.stream_options.model_dump(),
            "return_token_ids": True,
        }


class TokensChoice(WireOutput):
    """One answer, or what a chunk adds to it."""

    LONG: ClassVar[bool] = True

    index: int
    """The answer's position among the `n`."""
    token_ids: list[int]
    """The generated tokens, with the one that ended the answer."""
    logprobs: ChatLogprobs | None
    """Logprobs of these tokens, if the request asked for them. Tokens are written as `token_id:<id>`."""
    finish_reason: FinishReasonText | None
    """Why the answer ended; null in a chunk before the last."""
    stop_reason: str | int | None = None
    """The stop string that ended the answer, or the token of `stop_token_ids`."""


class TokenCompletion(AnswerObject):
    """The whole answer, or one chunk of a stream."""

    LONG: ClassVar[bool] = True

    object: Literal["token_completion"]
    request_id: str
    """The `request_id` of the request, or the server's own."""
    choices: list[TokensChoice]
    """All answers; in a chunk of a stream, the one that the chunk adds to, or none."""
    prompt_token_ids: list[int] | None = None
    """The tokens of the prompt, with `return_token_ids`; in a stream, in the first chunk."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt, its logprob and those of likely tokens, by token id; null for the first token, and
    null instead of the list if the request did not ask for them."""


class RenderedChat(WireOutput):
    """A conversation as a body for `/inference/v1/generate`."""

    LONG: ClassVar[bool] = True

    token_ids: list[int]
    """The token ids of the rendered conversation."""
    sampling_params: dict[str, Any]
    """The sampling fields of the request."""
    model: str | None = None
    """As in the request."""
    lora_adapter: str | None = None
    """As in the request."""
    cache_salt: str | None = None
    """As in the request."""
    priority: int
    """As in the request."""
    stream: bool
    """As in the request."""
