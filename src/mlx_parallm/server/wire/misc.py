"""The small routes: models, tokenizer, probes, sleep."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from mlx_parallm.server.wire.base import WireInput, WireOutput, refused
from mlx_parallm.server.wire.chat import Messages, TemplateOptions
from mlx_parallm.server.wire.fields import TokenIds


class TokenizeBody(WireInput):
    """A prompt's text, or messages for the chat template; exactly one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise refused("send either prompt or messages", "prompt")
        return self


class Tokens(WireOutput):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeBody(WireInput):
    model: str | None = None
    tokens: TokenIds


class Detokenized(WireOutput):
    prompt: str


class TokenizerInfo(WireOutput):
    """What a remote client needs to render the chat template itself."""

    eos_token: str | None
    bos_token: str | None
    eos_token_ids: list[int]
    vocab_size: int
    chat_template: str | None


class Model(WireOutput):
    """`root` and `parent` are vLLM's: an adapter's parent is the model it adapts. Only adapters have a `version`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    version: int | None = None


class ModelList(WireOutput):
    object: Literal["list"]
    data: list[Model]


class Status(WireOutput):
    status: str


class Sleeping(WireOutput):
    is_sleeping: bool


class Version(WireOutput):
    version: str


class DebugState(WireOutput):
    """For people with curl: the engine's own snapshot, and the HTTP face's counts."""

    engine: dict[str, Any]
    server: dict[str, Any]
    model: dict[str, Any]
