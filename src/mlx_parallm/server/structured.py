"""What an answer must look like, ready for the engine."""

from __future__ import annotations

from dataclasses import replace

from mlx_parallm.core import Grammar, GrammarCompiler, Thinks
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.wire.grammar import StructuredBody


def compiled(
    body: StructuredBody,
    grammars: GrammarCompiler,
    thinks: Thinks = Thinks.NO,
    spelled: frozenset[int] = frozenset(),
) -> Grammar | None:
    """The grammar that `body` asks for; see `GrammarSpec`. Takes a while: for a worker thread.

    Raises:
        InvalidRequestError: it cannot be enforced; names the field.
    """
    if body.grammar is None:
        return None
    param, spec = body.grammar
    try:
        return grammars.compile(replace(spec, thinks=thinks, spelled=spelled))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from None
