"""The fields that completions and chat share, and the objects that both answer with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_parallm.server.settings import MAX_SEQUENCES
from mlx_parallm.server.wire.base import WireInput, WireOutput
from mlx_parallm.server.wire.fields import LogitBias, Metadata, Stops

MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(WireInput):
    """How a stream reports usage. Taken without `stream` too, where it changes nothing."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(WireInput):
    """What may be asked of any generation. Ranges are OpenAI's, or vLLM's for the fields OpenAI lacks.

    `model`, `lora_adapter` and mlx-lm's `adapters` may each name an adapter; more than one must agree.
    """

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "store",
            "service_tier",
            "parallel_tool_calls",
            "thinking",
            "reasoning_effort",
            "verbosity",
        }
    )
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "use_beam_search": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
    }

    model: str | None = None
    lora_adapter: str | None = None
    adapters: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops = Field(default_factory=list)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    return_token_ids: bool = False
    prompt_logprobs: TopLogprobs | None = None
    metadata: Metadata | None = None


class PromptTokensDetails(WireOutput):
    cached_tokens: int


class Usage(WireOutput):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptLogprob(WireOutput):
    """One candidate at one prompt position (vLLM's form); `rank` is known for the best ones only."""

    logprob: float
    rank: int | None = None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReasonText = Literal["stop", "length"]


class ErrorDetail(WireOutput):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(WireOutput):
    """The body of every answer that is not a success."""

    error: ErrorDetail
