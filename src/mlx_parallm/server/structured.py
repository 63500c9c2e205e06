"""What an answer must look like, ready for the engine."""

from __future__ import annotations

from mlx_parallm.core import Grammar, GrammarCompiler
from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.wire.grammar import StructuredBody


def compiled(body: StructuredBody, grammars: GrammarCompiler) -> Grammar | None:
    """The grammar that `body` asks for. Takes a while: for a worker thread.

    Raises:
        InvalidRequestError: it cannot be enforced; names the field.
    """
    if body.grammar is None:
        return None
    param, spec = body.grammar
    try:
        return grammars.compile(spec)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from None
