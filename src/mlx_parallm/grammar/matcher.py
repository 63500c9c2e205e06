"""One text on its way through a compiled grammar."""

from __future__ import annotations

import ctypes

from llguidance import LLMatcher

from mlx_parallm.errors import GrammarError

_ALL_BITS = 0xFF


class LLGrammar:
    """Implements `core.Grammar`.

    Args:
        matcher: at the beginning of a text; copied, never moved on.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> LLState:
        return LLState(self._matcher.deep_copy())


class LLState:
    """Implements `core.GrammarState`. llguidance lets go of the interpreter while it computes a mask."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`. A matcher that has failed allows everything; `accept` then says why."""
        words = (ctypes.c_char * mask.nbytes).from_buffer(mask)
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), mask.nbytes)
        if self._matcher.is_error():
            ctypes.memset(words, _ALL_BITS, mask.nbytes)

    def accept(self, token: int) -> None:
        """See `core.GrammarState.accept`."""
        if not self._matcher.consume_token(token):
            reason = " ".join(self._matcher.get_error().split())[:200]
            raise GrammarError(f"the grammar gave up after this text: {reason}")

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()
