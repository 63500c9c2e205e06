"""OneModel: the base models of a server that has one, which is always loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.models import GENERIC_NAME, BaseStatus, ModelState, ServedModel
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.grammar.compiler import LLCompiler


class OneModel:
    """Implements `core.BaseModels`. `templates`: see `ServedModel`."""

    def __init__(
        self, tokenizer: TextTokenizer, card: ModelCard, templates: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        grammars = LLCompiler(tokenizer, card.vocab_size)
        self.first = ServedModel(card, tokenizer, grammars, frozenset({*card.names, GENERIC_NAME}), templates)

    def find(self, *names: str | None) -> str:
        """See `core.BaseModels.find`."""
        return self.first.card.name

    @property
    def names(self) -> frozenset[str]:
        """See `core.BaseModels.names`."""
        return self.first.names

    def is_ready(self, base: str) -> bool:
        """See `core.BaseModels.is_ready`."""
        return True

    def statuses(self) -> tuple[BaseStatus, ...]:
        """See `core.BaseModels.statuses`."""
        return (BaseStatus(self.first.card.name, ModelState.LOADED, self.first.card),)

    @asynccontextmanager
    async def use(self, base: str) -> AsyncIterator[ServedModel]:
        """See `core.BaseModels.use`."""
        yield self.first

    def close(self) -> None:
        """See `core.BaseModels.close`."""
        self.first.grammars.close()
