"""The request fields that completions and chat share."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mlx_parallm.server.api.fields import CHOSEN_ID, INT32_MAX, Neutral, OpenBody, WireInput, refused
from mlx_parallm.server.api.grammar_fields import StructuredBody, is_shallow
from mlx_parallm.server.api.sampling_fields import (
    MAX_SEQUENCES,
    BasicSampling,
    Candidates,
    PromptLength,
    SamplingFields,
)

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_COLLECTED_METADATA_BYTES, MAX_COLLECTED_METADATA_DEPTH = 64 * 1024, 32
MAX_SCORER = 512
"""Largest number of characters of a scorer's name, or of an expression that combines several scorers."""
MAX_CACHE_SALT = 512
"""Largest number of characters of a `cache_salt`."""
MIN_COLLECTED_TEMPERATURE = 0.01
"""Smallest temperature with `collect_trajectory`. Near 0, the distribution has all its mass on one token, and its
logprobs carry no information for training."""

MAX_EPISODE_ID, MAX_GROUP = 256, 4096
"""Largest number of characters of a `group_id` or `episode_id`, and largest `group_size`."""
COLLECTION_HEADERS: Mapping[str, tuple[str, type]] = {
    "x-group-id": ("group_id", str),
    "x-group-size": ("group_size", int),
    "x-episode-id": ("episode_id", str),
    "x-turn": ("turn", int),
}
"""Headers that stand for fields of the body, with the types of the fields, for clients that can add only headers."""
COLLECTION_FIELDS = ("scoring_function", *(name for name, _ in COLLECTION_HEADERS.values()))
"""Fields that need `collect_trajectory`."""

BIASING_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (None,),
}
"""Options that bias the sampling distribution, and the values that they may have with `collect_trajectory`."""
COLLECTION_RULE = "a trajectory is sampled from the model's own distribution at its temperature"

UNSUPPORTED_OPTIONS: Neutral = {
    "early_stopping": (False,),
    "ebnf": (),
    "grammar": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "lora_path": (),
    "regex": (),
    "response_format": ({},),
    "structured_outputs": ({},),
    "use_beam_search": (False,),
}
"""The part of `NEUTRAL` that all generating routes share."""


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises the error of `refused` unless `metadata` is OpenAI's: a few short strings."""
    if len(metadata) > MAX_METADATA:
        raise refused(f"must map at most {MAX_METADATA} strings to strings", "metadata")
    for key, text in metadata.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            limits = f"keys have at most {MAX_METADATA_KEY} characters, values are text of at most {MAX_METADATA_VALUE}"
            raise refused(f"{limits}; any JSON is accepted with collect_trajectory", "metadata")


def _check_collected_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises the error of `refused` unless `metadata`, which goes to a scorer, is JSON of bounded depth and size."""
    if not is_shallow(metadata, MAX_COLLECTED_METADATA_DEPTH):
        raise refused(f"is nested deeper than {MAX_COLLECTED_METADATA_DEPTH} levels", "metadata")
    try:
        size = len(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode("utf-8"))
    except ValueError:
        raise refused("numbers must be finite", "metadata") from None
    if size > MAX_COLLECTED_METADATA_BYTES:
        raise refused(f"has {size} bytes as JSON; at most {MAX_COLLECTED_METADATA_BYTES} are kept", "metadata")


# ---- the body --------------------------------------------------------------------------------------

Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]


class StreamOptions(WireInput):
    """What a stream reports about usage."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """Whether one more chunk, before the end, has the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far; needs `include_usage`."""


class CollectableBody(OpenBody):
    """The fields that name the adapter, and those about the collection of answers for training."""

    HEADERS: ClassVar[Mapping[str, tuple[str, type]]] = COLLECTION_HEADERS

    model: str | None = None
    """The served model, `base`, or an adapter: its name (for the live version), `name@version`, or a checkpoint of the
    default adapter. If it is left out or names the served model, the route of `/v1/adapters/route` chooses."""
    lora_adapter: str | None = None
    """An adapter, named as in `model`. `model` may name the served model at the same time. If both name an adapter,
    they must agree."""
    metadata: dict[str, Any] | None = None
    """At most 16 short strings, returned with the answer. With `collect_trajectory`, any JSON of at most 64 KiB and 32
    levels, for the scorer. If the scorer needs an answer and the metadata has none, the server uses the answer of its
    task with the id `problem_id`, or else of its task with the prompt's text. The scorer `reward` gets all columns of
    that task; those of the metadata take precedence."""
    collect_trajectory: bool = False
    """Whether the answers are kept for training. All answers to a prompt are one group."""
    scoring_function: Annotated[str, Field(min_length=1, max_length=MAX_SCORER)] | None = None
    """The scorer that rewards the collected answers; `reward` is the one that the operator configured. If it is left
    out, clients send rewards as feedback."""
    group_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """With `collect_trajectory`: the answers of all requests with the same `group_id` are one group, whose rewards are
    compared with each other. The header `X-Group-Id` can be sent instead of this field."""
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP)] | None = None
    """The group is closed, and can be trained on, when this many of its answers or episodes have ended. If it is left
    out, the group is closed by `POST /v1/training/groups/{group_id}/close`. Also the header `X-Group-Size`."""
    episode_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """With `collect_trajectory`: the requests with the same `episode_id` are the turns of one episode, which gets one
    reward. A chat that repeats the messages of an earlier turn and its answer continues the very tokens of that turn.
    Also the header `X-Episode-Id`."""
    turn: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """The place of the request in its episode. A turn that comes again replaces the earlier one. If it is left out, the
    turns are in order of their arrival. Also the header `X-Turn`."""
    traffic_class: Literal["live", "rollout"] | None = None
    """Whether the request is live traffic or a rollout for training. While requests of both kinds wait, each kind gets
    its share of the batch's rows. By default, a request is live; with `collect_trajectory` it is a rollout, unless the
    server is configured otherwise."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """A text of the client's choice. Requests share cached prefixes only with requests that have the same one, so that
    nobody else can tell from the time of an answer what a prompt contained. Requests without one share with each other.
    """

    def sent_collection(self) -> dict[str, Any]:
        """Those of these fields that the client sent, as another body can have them."""
        return {name: getattr(self, name) for name in CollectableBody.model_fields if name in self.model_fields_set}


class SharedBody(CollectableBody, BasicSampling):
    """The fields that all generating routes of OpenAI share."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"prompt_cache_key", "prompt_cache_retention", "service_tier"})

    user: str | None = None
    """The user. While two versions of an adapter are compared, all requests of a user get the same one; so do those of
    a session, which the header `X-Session-Id` names. It has no other effect."""
    safety_identifier: str | None = None
    """OpenAI's newer name of `user`."""
    stream: bool = False
    """Whether the answer is sent as server-sent events instead of one body."""


class GenerationBody(SharedBody, SamplingFields, StructuredBody):
    """The fields that completions and chat share."""

    IGNORED: ClassVar[frozenset[str]] = (
        SharedBody.IGNORED
        | StructuredBody.IGNORED
        | {"kv_transfer_params", "reasoning_effort", "store", "thinking", "verbosity", "vllm_xargs"}
    )
    NEUTRAL: ClassVar[Neutral] = UNSUPPORTED_OPTIONS
    MODEL_DEFAULTS: ClassVar[bool] = True
    """Whether the model's own defaults may count for fields that are left out; see `takes_defaults`."""
    PROCESSED_LOGPROBS: ClassVar[bool] = False
    """Whether logprobs are those of the distribution that tokens are sampled from, whatever `--logprobs-mode` says."""

    adapters: str | None = None
    """mlx-lm's name for `lora_adapter`, or the path of an adapter's folder under the operator's adapter roots, which is
    loaded by the first request that names it. A path contains a `/`."""
    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    """Must be 1 or equal to `n`: all answers that are generated are returned."""
    stream_options: StreamOptions = StreamOptions()
    """What a stream reports about usage. It has no effect without `stream`."""
    request_id: Annotated[str, Field(pattern=f"^{CHOSEN_ID.pattern}$")] | None = None
    """An id of the client's choice, which the answer's `id` ends with, and which is in the header `x-request-id` of the
    answer. A header of that name that the client sends takes precedence."""
    truncate_prompt_tokens: PromptLength | None = None
    """Keep only this many tokens of each prompt; -1 keeps as many as leave room for the answer. By default, nothing is
    cut off, and a prompt that is too long is refused."""
    truncation_side: Literal["left", "right"] = "left"
    """The side on which `truncate_prompt_tokens` cuts: `left` keeps the last tokens, `right` the first ones."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    return_token_ids: bool = False
    """Whether the answer has the token ids of the prompt and of each choice."""
    return_tokens_as_token_ids: bool | None = None
    """Whether tokens in `logprobs` are written as `token_id:<id>`, which is unique, unlike their texts. If it is left
    out, `--return-tokens-as-token-ids` decides."""

    @property
    @abstractmethod
    def task_prompt(self) -> str | None:
        """The text of the prompt, by which the server finds its task. None if there is no such text, or several."""

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """The number of tokens that the client asks for at most; None if it does not say."""

    @property
    def takes_defaults(self) -> bool:
        """Whether the defaults of the model and of the operator count for fields that are left out. They do not for a
        trajectory, which is sampled from the model's own distribution."""
        return self.MODEL_DEFAULTS and not self.collect_trajectory

    @property
    def default_max_tokens(self) -> int | None:
        """The limit if the client asks for none; less if the context has less room. None: the model's own default, or
        else as many as fit."""
        return None

    @property
    @abstractmethod
    def candidates(self) -> Candidates:
        """The most likely tokens to report for each generated token."""

    @property
    def prompt_candidates(self) -> Candidates:
        """The most likely tokens to report for each token of the prompt."""
        return Candidates("prompt_logprobs", self.prompt_logprobs)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.best_of not in (None, 1, self.n):
            raise refused("not supported by this server except as 1 or the same as n; leave it out", "best_of")
        if self.truncate_prompt_tokens == 0:
            raise refused("must be at least 1, or -1", "truncate_prompt_tokens")
        if self._grammar is not None:
            self.check_grammar_options(self._grammar[0])
        if self.collect_trajectory:
            self._check_collected()
        elif given := [name for name in COLLECTION_FIELDS if getattr(self, name) is not None]:
            raise refused("needs collect_trajectory: true", given[0])
        elif self.metadata:
            _check_metadata(self.metadata)
        return self

    def check_grammar_options(self, param: str) -> None:
        """Raises the error of `refused` if an option cannot be combined with a grammar, for which `param` asks."""
        if self.collect_trajectory:
            raise refused(f"not supported with collect_trajectory: {COLLECTION_RULE}; leave it out", param)
        for name in ("min_tokens", "ignore_eos", "stop_token_ids"):
            if getattr(self, name):
                raise refused(f"cannot be combined with {param}, which decides where the text ends", name)
        if self.allowed_token_ids is not None:
            raise refused(f"cannot be combined with {param}, which decides which tokens may come", "allowed_token_ids")

    def _check_collected(self) -> None:
        _check_collected_metadata(self.metadata or {})
        for name, allowed in BIASING_OPTIONS.items():
            if getattr(self, name) not in allowed:
                raise refused(f"not supported with collect_trajectory: {COLLECTION_RULE}; leave it out", name)
        for name, needed in (("group_size", "group_id"), ("turn", "episode_id")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise refused(f"needs {needed}", name)
        if self.episode_id is not None and self.n > 1:
            raise refused("must be 1 with episode_id: an episode has one answer a turn", "n")
        if self.episode_id is not None and self.truncate_prompt_tokens is not None:
            raise refused("not supported with episode_id, whose turns continue each other", "truncate_prompt_tokens")
        if self.temperature < MIN_COLLECTED_TEMPERATURE:
            least = f"must be at least {MIN_COLLECTED_TEMPERATURE} with collect_trajectory"
            raise refused(f"{least}: {COLLECTION_RULE}", "temperature")
