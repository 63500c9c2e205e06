"""The body of `POST /generate`, in three forms that environments of Atropos send:

prompt        with vLLM's sampling parameters beside it
input_ids     with SGLang's in `sampling_params`
prompts       with those of TRL's server beside them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from mlx_parallm.server.api.fields import INT32_MAX, Neutral, NonEmptyTokenIds, WireInput, refused
from mlx_parallm.server.api.generation_fields import UNSUPPORTED_OPTIONS, CollectableBody, Priority
from mlx_parallm.server.api.sampling_fields import NO_LIMIT, SamplingFields, Seed, TokenLimit, TopLogprobs
from mlx_parallm.server.protocols.tokens.schema import WITHOUT_EFFECT

FORMS = ("prompt", "input_ids", "prompts")
"""The fields that have a body's prompts in the forms of vLLM, SGLang and TRL."""


class TokensPrompt(WireInput):
    """A prompt in vLLM's form."""

    NEUTRAL: ClassVar[Neutral] = {"multi_modal_data": (), "prompt_embeds": ()}

    prompt_token_ids: NonEmptyTokenIds
    """Its token ids."""


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
    """Prompts in the form of vLLM (`prompt`), SGLang (`input_ids`) or TRL (`prompts`), and how to continue them.
    SGLang's sampling parameters are in `sampling_params`, those of the others beside the prompts."""

    IGNORED: ClassVar[frozenset[str]] = WITHOUT_EFFECT | {
        "log_metrics",
        "return_hidden_states",
        "rid",
        "session_params",
    }
    NEUTRAL: ClassVar[Neutral] = {
        **UNSUPPORTED_OPTIONS,
        "audio_data": (),
        "generation_kwargs": ({},),
        "image_data": (),
        "images": (),
        "input_embeds": (),
        "logprob_start_len": (-1,),
        "return_text_in_logprobs": (False,),
        "stream": (False,),
        "text": (),
        "token_ids_logprob": (),
        "top_logprobs_num": (0,),
        "video_data": (),
    }
    NULL_VALUES: ClassVar[Mapping[str, object]] = {"max_tokens": NO_LIMIT}

    prompt: TokensPrompt | None = None
    """vLLM: one prompt."""
    prompts: Annotated[list[str], Field(min_length=1)] | None = None
    """TRL: texts, each of which gets `n` answers."""
    input_ids: NonEmptyTokenIds | None = None
    """SGLang: the token ids of one prompt."""
    sampling_params: SGLangSampling = SGLangSampling()
    """SGLang: how to continue the prompt."""
    max_tokens: TokenLimit | None = None
    """vLLM and TRL: maximum number of tokens to generate, by default 16; null and -1 mean as many as the context has
    room for."""
    logprobs: TopLogprobs | None = None
    """vLLM: return the logprobs of the generated tokens and, at each position, of this many most likely tokens."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    return_logprob: bool = False
    """SGLang: return the logprobs of the generated tokens."""

    @property
    def form(self) -> str:
        """The field that has the prompts."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise refused(f"send one of {', '.join(FORMS)}", given[1] if given else "prompt")
        if self.prompt is None and {self.prompt_logprobs, self.sampling_params.prompt_logprobs} != {None}:
            raise refused("only with prompt", "prompt_logprobs")
        if given == ["input_ids"]:
            names = (*SamplingFields.model_fields, "max_tokens", "logprobs")
            if outside := next((name for name in names if name in self.model_fields_set), None):
                raise refused("belongs into sampling_params with input_ids", outside)
        elif "sampling_params" in self.model_fields_set:
            raise refused(f"only with input_ids; with {given[0]}, its fields are beside it", "sampling_params")
        return self

    def prompts_of(self) -> list[Any]:
        """The prompts as `/v1/completions` takes them: texts, or lists of token ids."""
        if self.prompt is not None:
            return [self.prompt.prompt_token_ids]
        return self.prompts or [self.input_ids]
