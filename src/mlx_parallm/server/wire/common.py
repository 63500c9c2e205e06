"""The fields that completions and chat share, and the objects that both answer with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mlx_parallm.server.settings import MAX_SEQUENCES
from mlx_parallm.server.wire.base import WireInput, WireOutput, refused
from mlx_parallm.server.wire.fields import LogitBias, Stops, check_collected_metadata, check_metadata
from mlx_parallm.server.wire.grammar import StructuredBody
from mlx_parallm.server.wire.neutral import GENERATION, Neutral

MAX_LOGPROBS = 20
INT32_MAX = 2**31 - 1
NO_LIMIT = -1
"""As a number of tokens to draw: all that fit."""
MAX_SCORER = 512
"""Characters of a scorer's name, or of a composite of several."""
MIN_COLLECTED_TEMPERATURE = 0.01
"""Near 0 a distribution is all on one token: its logprobs tell nothing."""

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


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
    """How a stream reports usage."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """One chunk more, before the end, with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """The usage so far in every chunk; needs `include_usage`."""


class GenerationBody(StructuredBody):
    """What may be asked of any generation. Ranges are OpenAI's, or vLLM's for the fields OpenAI lacks."""

    IGNORED: ClassVar[frozenset[str]] = StructuredBody.IGNORED | frozenset(
        {
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "store",
            "service_tier",
            "thinking",
            "reasoning_effort",
            "verbosity",
        }
    )
    NEUTRAL: ClassVar[Neutral] = GENERATION

    model: str | None = None
    """The served model, `base`, or an adapter: its name (its live version), `name@version`, or a checkpoint of the
    default adapter. Left out: what the route says."""
    lora_adapter: str | None = None
    """An adapter, as `model` names one; where both do, they must agree."""
    adapters: str | None = None
    """mlx-lm's name for `lora_adapter`."""
    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    """Only 1 or the same as `n`: no answer is drawn and thrown away."""
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1
    """Answers to each prompt. `n` times the prompts is bounded too, see `/server_info`."""
    stream: bool = False
    """Server-sent events instead of one body."""
    stream_options: StreamOptions = StreamOptions()
    """How a stream tells usage; taken without `stream` too, where it changes nothing."""
    temperature: Temperature = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: TopP = 1.0
    """Least probability mass that the best tokens must have; 1 is off, 0 is greedy."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    """Number of best tokens that may be drawn; 0 and -1 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability, as a share of the best token's; 0 is off."""
    seed: Seed | None = None
    """Equal seeds draw equal tokens, whatever the neighbours; sample j of a prompt draws with `seed` + j."""
    stop: Stops = Field(default_factory=list)
    """Texts that end an answer, and are no part of it: one, or a list."""
    presence_penalty: Penalty = 0.0
    """Taken from the logit of each token that the answer has already."""
    frequency_penalty: Penalty = 0.0
    """The same, times the number of its occurrences."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divides the positive logits of tokens in prompt and answer, multiplies the negative ones; 1 is off."""
    logit_bias: LogitBias = Field(default_factory=dict)
    """Added to logits: token id, in decimal digits, to bias."""
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """Tokens before an answer may end by itself."""
    ignore_eos: bool = False
    """Goes on past the end-of-sequence token."""
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    """Lower runs earlier."""
    return_token_ids: bool = False
    """Adds the ids of prompt and answer to the answer."""
    return_tokens_as_token_ids: bool = False
    """Writes the tokens in `logprobs` as `token_id:<id>`, which no two tokens share."""
    prompt_logprobs: TopLogprobs | None = None
    """Logprobs of the prompt's own tokens, and of so many best ones at each place."""
    metadata: dict[str, Any] | None = None
    """At most 16 short strings, said again in the answer; with `collect_trajectory` any JSON of at most 64 KiB and 32
    levels, for the scorer."""
    collect_trajectory: bool = False
    """Keeps what is drawn, for training; the `n` answers to a prompt are one group."""
    scoring_function: Annotated[str, Field(min_length=1, max_length=MAX_SCORER)] | None = None
    """Who rewards what is collected; left out, feedback does."""

    @model_validator(mode="after")
    def _answers_with_all(self) -> Self:
        if self.best_of not in (None, 1, self.n):
            raise refused("not supported by this server but as 1 or the same as n; leave it out", "best_of")
        return self

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
    """Where a prompt's tokens came from."""

    cached_tokens: int
    """Prompt tokens that were not computed anew."""


class Usage(WireOutput):
    """Tokens of a request."""

    prompt_tokens: int
    """Tokens of all prompts."""
    completion_tokens: int
    """Tokens drawn, for all answers."""
    total_tokens: int
    """Both."""
    prompt_tokens_details: PromptTokensDetails | None = None
    """Where they came from."""


class PromptLogprob(WireOutput):
    """One candidate at one prompt position (vLLM's form)."""

    logprob: float
    """Nats, of the raw model."""
    rank: int
    """One more than the number of tokens that are more likely: 1 is the best."""
    decoded_token: str
    """The token's text."""


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReasonText = Literal["stop", "length"]


class ErrorDetail(WireOutput):
    """What every error says."""

    message: str
    """What is wrong and what to change."""
    type: str
    """`invalid_request_error`, `rate_limit_error` or `server_error`."""
    param: str | None
    """The field at fault."""
    code: str | None
    """What programs go by; null for a malformed field."""


class ErrorBody(WireOutput):
    """The body of every answer that is not a success."""

    error: ErrorDetail
    """What went wrong."""
