"""The body of `POST /generate`, in three forms that programs for reinforcement learning send:

prompt                with vLLM's sampling parameters beside it
input_ids or text     with SGLang's in `sampling_params`
prompts               with those of TRL's server beside them
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator

from mlx_parallm.server.api.fields import INT32_MAX, Neutral, TokenId, is_token_ids, refused
from mlx_parallm.server.api.generation_fields import UNSUPPORTED_OPTIONS, CollectableBody, Priority
from mlx_parallm.server.api.sampling_fields import (
    NO_LIMIT,
    FewLogprobs,
    SamplingFields,
    Seed,
    TokenLimit,
    TopLogprobs,
)
from mlx_parallm.server.protocols.tokens.schema import WITHOUT_EFFECT

MAX_RID = 256

Prompt = str | list[int]


class Form(Enum):
    """The form of a body, by the program whose server has it."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    TRL = "TRL"


FORMS: Mapping[str, Form] = {
    "prompt": Form.VLLM,
    "input_ids": Form.SGLANG,
    "text": Form.SGLANG,
    "prompts": Form.TRL,
}
"""The form of a body, by the field that has its prompts."""
ONE_PROMPT = f"send one of {', '.join(FORMS)}"


def _prompt(value: object) -> Prompt:
    if isinstance(value, dict) and len(value) == 1:
        [(name, inner)] = value.items()
        if (name == "prompt_token_ids" and is_token_ids(inner)) or (name == "prompt" and isinstance(inner, str)):
            return inner
    if isinstance(value, str) or is_token_ids(value):
        return value
    raise refused('must be a text, a list of token ids, or {"prompt_token_ids": […]}')


def _texts(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return texts
    raise refused("must be a text or a non-empty list of texts")


def _ids(value: object) -> list[int] | list[list[int]]:
    if is_token_ids(value) or (isinstance(value, list) and value and all(map(is_token_ids, value))):
        return value
    raise refused("must be a list of token ids or a list of such lists; no list may be empty")


_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Texts = Annotated[list[str], Field(min_length=1)]
OnePrompt = Annotated[Prompt, PlainValidator(_prompt, json_schema_input_type=str | _Ids | dict[str, str | _Ids])]
Texts = Annotated[list[str], PlainValidator(_texts, json_schema_input_type=str | _Texts)]
SomeIds = Annotated[
    list[int] | list[list[int]],
    PlainValidator(_ids, json_schema_input_type=_Ids | Annotated[list[_Ids], Field(min_length=1)]),
]


class SGLangSampling(SamplingFields):
    """SGLang's sampling parameters."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"custom_params", "stream_interval"})
    NEUTRAL: ClassVar[Neutral] = {
        **UNSUPPORTED_OPTIONS,
        "ebnf": (),
        "no_stop_trim": (False,),
        "regex": (),
        "stop_regex": (),
        "structural_tag": (),
    }

    max_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Maximum number of tokens to generate: by default 128, or fewer if fewer fit."""
    min_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    """Number of tokens before the answer may end by itself."""
    sampling_seed: Seed | None = None
    """SGLang's name for `seed`."""


class GenerateBody(CollectableBody, SamplingFields):
    """Prompts in the form of vLLM (`prompt`), SGLang (`input_ids` or `text`) or TRL (`prompts`), and how to continue
    them. SGLang's sampling parameters are in `sampling_params`, those of the others beside the prompts."""

    IGNORED: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {"log_metrics", "return_hidden_states", "session_params"}
    NEUTRAL: ClassVar[Neutral] = {
        **UNSUPPORTED_OPTIONS,
        "audio_data": (),
        "generation_kwargs": ({},),
        "image_data": (),
        "images": (),
        "input_embeds": (),
        "stream": (False,),
        "token_ids_logprob": (),
        "video_data": (),
    }
    NULL_VALUES: ClassVar[Mapping[str, object]] = {"max_tokens": NO_LIMIT}

    prompt: OnePrompt | None = None
    """vLLM: a text, token ids, or `{"prompt_token_ids": […]}`."""
    prompts: Texts | None = None
    """TRL: texts, each of which gets `n` answers."""
    input_ids: SomeIds | None = None
    """SGLang: token ids, or a list of such lists, each of which gets `n` answers."""
    text: Texts | None = None
    """SGLang: a text or a list of texts, instead of `input_ids`."""
    sampling_params: SGLangSampling = SGLangSampling()
    """SGLang: how to continue the prompts."""
    max_tokens: TokenLimit | None = None
    """vLLM and TRL: maximum number of tokens to generate, by default 16; null and -1 mean as many as the context has
    room for."""
    logprobs: TopLogprobs | None = None
    """vLLM: return the logprobs of the generated tokens and, at each position, of this many most likely tokens."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    return_logprob: bool = False
    """SGLang: return the logprobs of the generated tokens."""
    logprob_start_len: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    """SGLang: return the logprobs of the prompt's tokens from this one on too; -1 means none."""
    top_logprobs_num: FewLogprobs = 0
    """SGLang: return this many most likely tokens at each position too."""
    return_text_in_logprobs: bool = False
    """SGLang: whether each token in the logprobs comes with its text."""
    lora_path: str | None = None
    """SGLang's name for `lora_adapter`."""
    rid: Annotated[str, Field(min_length=1, max_length=MAX_RID)] | None = None
    """SGLang: the request's id, which is returned."""

    @property
    def form(self) -> Form:
        return next(form for name, form in FORMS.items() if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise refused(ONE_PROMPT, given[1] if given else "prompt")
        if FORMS[given[0]] is Form.SGLANG:
            names = (*SamplingFields.model_fields, "max_tokens", "logprobs")
            if outside := next((name for name in names if name in self.model_fields_set), None):
                raise refused(f"belongs into sampling_params with {given[0]}", outside)
        elif "sampling_params" in self.model_fields_set:
            raise refused(f"only with input_ids or text; with {given[0]}, its fields are beside it", "sampling_params")
        return self

    def prompts_of(self) -> list[Any]:
        """The prompts as `/v1/completions` takes them: texts, or lists of token ids."""
        if self.input_ids is not None:
            return self.input_ids if isinstance(self.input_ids[0], list) else [self.input_ids]
        return self.text or self.prompts or [self.prompt]
