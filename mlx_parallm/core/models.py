"""The base models of a server, as routes see them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
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


class BaseModels(Protocol):
    """The base models of a server. Used on the event loop's thread only."""

    @property
    def first(self) -> ServedModel:
        """The one that trains, and that answers requests which name no model."""
        ...

    def find(self, *names: str | None) -> str:
        """The name of the base model that the first of these names means which is not None: its own name, or that of
        one of its adapters. The first base model, if they are all None or unknown."""
        ...

    def use(self, base: str) -> AbstractAsyncContextManager[ServedModel]:
        """The base model with this name, which `find` has returned. It stays loaded until the block ends."""
        ...

    def close(self) -> None:
        """Ends what the base models run outside the device thread."""
        ...
