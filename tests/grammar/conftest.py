"""A compiler of grammars over bytes."""

from collections.abc import Iterator

import pytest
from server.fakes import VOCAB, ByteTokenizer

from mlx_parallm.grammar.compiler import LLCompiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[LLCompiler]:
    made = LLCompiler(ByteTokenizer(), VOCAB)
    yield made
    made.close()
