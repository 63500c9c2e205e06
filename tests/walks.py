"""Texts of random tokens that a grammar allows, over the vocabulary of bytes: `from walks import allowed, walk`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from server.fakes import EOS, VOCAB

from mlx_parallm.core.grammar import Grammar, GrammarState


def allowed(state: GrammarState) -> set[int]:
    mask = bytearray(4 * -(-VOCAB // 32))
    state.fill(memoryview(mask))
    bits = int.from_bytes(mask, "little")
    return {token for token in range(VOCAB) if bits >> token & 1}


def walk(grammar: Grammar, seed: int, pull: Sequence[str] = ('"',), most: int = 4000) -> str:
    """Ends where it may, mostly. `pull`: texts that end what would go on for ever: one is begun now and then."""
    state, rng, text, ahead = grammar.start(), random.Random(seed), bytearray(), b""
    for _ in range(most):
        tokens = allowed(state)
        if state.ended or (EOS in tokens and rng.random() < 0.8):
            return text.decode()
        tokens.discard(EOS)
        if not ahead and rng.random() < 0.4:
            ahead = rng.choice(pull).encode()
        token, ahead = (ahead[0], ahead[1:]) if ahead and ahead[0] in tokens else (rng.choice(sorted(tokens)), b"")
        state.accept(token)
        text.append(token)
    raise AssertionError(f"no end after {most} bytes: {bytes(text[:300])!r}")


def follows(grammar: Grammar, text: str) -> bool:
    """Whether the grammar takes this text, and may end with it."""
    state = grammar.start()
    for token in text.encode():
        if token not in allowed(state):
            return False
        state.accept(token)
    return state.ended or EOS in allowed(state)
