"""The base models of a server, as routes see them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.grammar import GrammarCompiler
from mlx_parallm.core.text import TextTokenizer

GENERIC_NAME = "base-model"
"""A name of the first base model on every server."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request needs to know of its base model.

    Attributes:
        grammars: compiles grammars for the model's vocabulary.
        names: values of the field `model` that mean this base model and no adapter.
        templates: the chat templates besides the model's own that requests may choose, by name.
    """

    card: ModelCard
    tokenizer: TextTokenizer
    grammars: GrammarCompiler
    names: frozenset[str]
    templates: Mapping[str, str] = field(default_factory=dict)


class ModelState(StrEnum):
    """Whether a base model is in memory."""

    LOADED = "loaded"
    LOADING = "loading"
    """It is being loaded, or waits until another base model has given way."""
    LEAVING = "leaving"
    """It is unloaded for another base model as soon as its requests have ended. New ones wait."""
    IDLE = "idle"
    """It is on the disk only. The next request loads it."""
    FAILED = "failed"
    """It could not be loaded. A request some time later tries again."""


@dataclass(frozen=True, slots=True)
class BaseStatus:
    """A base model of a server.

    Attributes:
        card: None until it has been loaded once.
        adapters: names of its adapters in the adapter folder, until it has been loaded once.
        error: why it could not be loaded; empty if it could.
    """

    name: str
    state: ModelState
    card: ModelCard | None = None
    adapters: tuple[str, ...] = ()
    error: str = ""


class BaseModels(Protocol):
    """The base models of a server. Used on the event loop's thread only."""

    @property
    def first(self) -> ServedModel:
        """The one that trains, and that answers requests which name no model."""

    @property
    def names(self) -> frozenset[str]:
        """Values of the field `model` that mean a base model and no adapter."""

    def find(self, *names: str | None) -> str:
        """The name of the base model that these names mean: its own names, or those of its adapters. The first base
        model, if they are all None or unknown.

        Raises:
            InvalidRequestError: they mean different ones.
        """

    def use(self, base: str) -> AbstractAsyncContextManager[ServedModel]:
        """The base model with this name, which `find` has returned. It is loaded if it is not, and stays loaded until
        the block ends.

        Raises:
            ModelUnavailableError: it cannot be loaded.
            QueueTimeoutError: others kept the memory for too long.
        """

    def is_ready(self, base: str) -> bool:
        """Whether `use` returns at once."""

    def statuses(self) -> tuple[BaseStatus, ...]:
        """All base models, the first one first."""

    def close(self) -> None:
        """Ends what the base models run outside the device thread."""
