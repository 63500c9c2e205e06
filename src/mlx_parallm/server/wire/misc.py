"""The small routes: models, tokenizer, probes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from mlx_parallm.server.wire.base import OpenBody, WireOutput, refused
from mlx_parallm.server.wire.fields import TokenIds
from mlx_parallm.server.wire.messages import Messages, TemplateOptions


class TokenizeBody(OpenBody):
    """A prompt's text, or messages for the chat template; exactly one of the two."""

    model: str | None = None
    """Checked and not read: all share one tokenizer."""
    prompt: str | None = None
    """A text."""
    messages: Messages | None = None
    """A conversation, rendered with the chat template."""
    add_special_tokens: bool = True
    """Whether the tokenizer may add special tokens to a text."""
    add_generation_prompt: bool = True
    """Whether a conversation ends where the assistant begins."""
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    """Switches of the chat template."""

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise refused("send either prompt or messages", "prompt")
        return self


class Tokens(WireOutput):
    """What a text or a conversation is to the model."""

    tokens: list[int]
    """Their ids."""
    count: int
    """How many."""
    max_model_len: int
    """Tokens of prompt and answer that fit."""


class DetokenizeBody(OpenBody):
    """Token ids."""

    model: str | None = None
    """Checked and not read: all share one tokenizer."""
    tokens: TokenIds
    """Ids below the vocabulary's size."""


class Detokenized(WireOutput):
    """What token ids spell."""

    prompt: str
    """Their text."""


class TokenizerInfo(WireOutput):
    """What a remote client needs to render the chat template itself."""

    eos_token: str | None
    """Text of the end-of-sequence token."""
    bos_token: str | None
    """Text of the beginning-of-sequence token."""
    eos_token_ids: list[int]
    """Ids that end an answer."""
    vocab_size: int
    """Token ids are below it."""
    chat_template: str | None
    """Jinja."""


class Model(WireOutput):
    """One name that `model` takes."""

    id: str
    """What `model` takes."""
    object: Literal["model"]
    """Always the same."""
    created: int
    """Unix time, seconds."""
    owned_by: str
    """Always mlx_parallm."""
    root: str
    """Where an adapter came from; the model itself for a base."""
    parent: str | None
    """The model that an adapter adapts."""
    max_model_len: int
    """Tokens of prompt and answer that fit."""
    version: int | None = None
    """Of an adapter."""


class ModelList(WireOutput):
    """What `model` may name."""

    object: Literal["list"]
    """Always the same."""
    data: list[Model]
    """The base first."""


class Status(WireOutput):
    """A probe's yes."""

    status: str
    """`ok` or `ready`."""


class Version(WireOutput):
    """Which server this is."""

    version: str
    """Of this server."""


class DebugState(WireOutput):
    """For people with curl: the engine's own snapshot, and the HTTP face's counts."""

    engine: dict[str, Any]
    """The device thread's snapshot."""
    server: dict[str, Any]
    """The HTTP face's counts."""
    model: dict[str, Any]
    """The base model."""
