"""The request fields that Ollama's routes share: `options`, `format`, `think` and `keep_alive`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PlainValidator

from mlx_parallm.server.api.bodies import (
    NO_LIMIT,
    CollectableBody,
    FewLogprobs,
    Penalty,
    Seed,
    Stops,
    Temperature,
    TopP,
    checked_schema,
)
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, WireInput, refused

RANDOM_SEED = -1
"""The seed that means: another one for each request."""
Level = Literal["low", "medium", "high", "max"]
"""How much the model reasons."""
MAX_DURATION = 64
"""Largest number of characters of a `keep_alive`."""
CHAT_NAMES: Mapping[str, str] = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Chat's names of options, where they differ."""


class OllamaOptions(WireInput):
    """How tokens are sampled. An option that is left out has the model's own default, or else OpenAI's, and not
    Ollama's. Options for Ollama's hardware are ignored."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
            "num_ctx",
            "num_gpu",
            "num_keep",
            "num_thread",
            "numa",
            "use_mlock",
            "use_mmap",
            "vocab_only",
        }
    )

    num_predict: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    """Maximum number of tokens to generate. With -1, or any other number below 1, only the context limits the answer.
    """
    temperature: Temperature | None = None
    """Divides the logits; 0 means greedy decoding."""
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Sample from this many most likely tokens; 0 and -1 are off."""
    top_p: TopP | None = None
    """Sample from the fewest most likely tokens whose probabilities sum to at least this; 1 is off, 0 is greedy."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens with at least this share of the most likely token's probability; 0 is off."""
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Divides the positive logits of tokens in prompt and answer, and multiplies the negative ones; 1 is off."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logit of each token that is already in the answer."""
    frequency_penalty: Penalty | None = None
    """Subtracted from the logit of a token for each time it is already in the answer."""
    seed: Seed | None = None
    """Equal seeds sample equal tokens. -1 means another seed for each request."""
    stop: Stops = Field(default_factory=list)
    """One text or a list of texts. The answer ends before the first one that the model writes."""

    def for_chat(self) -> dict[str, Any]:
        """The options that were sent, as chat's fields."""
        sent = self.model_dump(exclude_unset=True)
        if sent.get("seed") == RANDOM_SEED:
            del sent["seed"]
        if sent.get("num_predict", 1) < 1:
            sent["num_predict"] = NO_LIMIT
        return {CHAT_NAMES.get(name, name): value for name, value in sent.items()}


def _format(value: object) -> Literal["json"] | dict[str, Any] | bool:
    if value == "json":
        return "json"
    if isinstance(value, str):
        raise refused('must be "json" or a JSON schema')
    return checked_schema(value)


def _think(value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value in get_args(Level)):
        return value
    raise refused(f"must be true, false or one of {', '.join(get_args(Level))}")


def _keep_alive(value: object) -> float | str:
    if isinstance(value, str) and len(value) <= MAX_DURATION:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and -INT32_MAX <= value <= INT32_MAX:
        return value
    raise refused("must be a number of seconds, or a duration such as 5m")


Format = Annotated[
    Literal["json"] | dict[str, Any] | bool,
    PlainValidator(_format, json_schema_input_type=Literal["json"] | dict[str, Any]),
]
Think = Annotated[bool | str, PlainValidator(_think, json_schema_input_type=bool | Level)]
Seconds = Annotated[float, Field(ge=-INT32_MAX, le=INT32_MAX)]
Duration = Annotated[str, Field(max_length=MAX_DURATION)]
KeepAlive = Annotated[float | str, PlainValidator(_keep_alive, json_schema_input_type=Seconds | Duration)]


class PromptedBody(CollectableBody):
    """The fields that chat and generate share."""

    NEUTRAL: ClassVar[Neutral] = {"format": ("",)}

    stream: bool = True
    """Whether the answer is sent in lines, as it is generated, instead of as one body."""
    options: OllamaOptions = OllamaOptions()
    """How tokens are sampled."""
    format: Format | None = None
    """`json` for any JSON object, or the JSON schema that the text follows. If it is left out, the text is free."""
    think: Think | None = None
    """Whether the model reasons before it answers, if its chat template has a switch for that; or how much, if the
    template knows such levels. If it is left out, the template decides."""
    keep_alive: KeepAlive | None = None
    """Accepted and ignored: the model stays in memory. Only without a prompt does 0 change the answer, to `unload`."""
    logprobs: bool = False
    """Whether to return the logprobs of the generated tokens."""
    top_logprobs: FewLogprobs = 0
    """Number of most likely tokens to return at each position as well; needs `logprobs`."""

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to report at each position; None: no logprobs."""
        return self.top_logprobs if self.logprobs else None

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` is 0, in some unit."""
        return re.fullmatch(r"0+(\.0+)?[a-zµ]*", str(self.keep_alive)) is not None

    def shared_fields(self) -> dict[str, Any]:
        """The fields of chat and of completions that this body gives."""
        return {
            **self.sent_collection(),
            **self.options.for_chat(),
            "stream": self.stream,
            "response_format": self._response_format(),
        }

    def chat_fields(self) -> dict[str, Any]:
        """The fields of chat that this body gives."""
        more = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return {**self.shared_fields(), **more, "chat_template_kwargs": self._template_variables()}

    def _response_format(self) -> dict[str, Any] | None:
        if self.format is None:
            return None
        if self.format == "json":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}

    def _template_variables(self) -> dict[str, Any] | None:
        """The switches of the chat template for reasoning, under the names that model families have for them."""
        if self.think is None:
            return None
        thinks = self.think is not False
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": thinks, "thinking": thinks, **level}
