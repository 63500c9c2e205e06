"""The fields that completions and chat share, and the objects that both answer with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mlx_parallm.server.settings import MAX_SEQUENCES
from mlx_parallm.server.wire.base import WireInput, WireOutput, refused
from mlx_parallm.server.wire.fields import LogitBias, Stops, check_collected_metadata, check_metadata
from mlx_parallm.server.wire.grammar import StructuredBody

MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1
MAX_SCORER = 512
"""Characters of a scorer's name, or of a composite of several."""
MIN_COLLECTED_TEMPERATURE = 0.01
"""Near 0 a distribution is all on one token: its logprobs tell nothing."""

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


UNBIASED: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
}
"""What a collected request may say of options that bias the distribution."""
COLLECTION_RULE = "a trajectory is drawn from the model's own distribution at its temperature"


class StreamOptions(WireInput):
    """How a stream reports usage. Taken without `stream` too, where it changes nothing."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(StructuredBody):
    """What may be asked of any generation. Ranges are OpenAI's, or vLLM's for the fields OpenAI lacks.

    `model`, `lora_adapter` and mlx-lm's `adapters` may each name an adapter; more than one must agree.
    `collect_trajectory` keeps what is drawn for training; `scoring_function` names who rewards it (left out: feedback
    does), and `metadata` is what that scorer reads: any JSON up to 64 KiB then, OpenAI's short strings otherwise.
    """

    IGNORED: ClassVar[frozenset[str]] = StructuredBody.IGNORED | frozenset(
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
        **StructuredBody.UNSUPPORTED,
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
    metadata: dict[str, Any] | None = None
    collect_trajectory: bool = False
    scoring_function: Annotated[str, Field(min_length=1, max_length=MAX_SCORER)] | None = None

    @model_validator(mode="after")
    def _follows_its_grammar(self) -> Self:
        if self.grammar is None:
            return self
        if self.collect_trajectory:
            raise refused(f"not with collect_trajectory: {COLLECTION_RULE}; leave it out", self.grammar[0])
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise refused(f"not with {self.grammar[0]}: that says where the text ends; leave it out", name)
        return self

    @model_validator(mode="after")
    def _collects(self) -> Self:
        if self.collect_trajectory:
            self._check_collected()
        elif self.scoring_function is not None:
            raise refused("needs collect_trajectory: true", "scoring_function")
        else:
            check_metadata(self.metadata or {})
        return self

    def _check_collected(self) -> None:
        check_collected_metadata(self.metadata or {})
        for name, neutral in UNBIASED.items():
            if getattr(self, name) not in neutral:
                raise refused(f"not with collect_trajectory: {COLLECTION_RULE}; leave it out", name)
        if self.temperature < MIN_COLLECTED_TEMPERATURE:
            least = f"at least {MIN_COLLECTED_TEMPERATURE} with collect_trajectory"
            raise refused(f"{least}: {COLLECTION_RULE}", "temperature")


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
