"""A grammar of what a model says once it has thought."""

from __future__ import annotations

from mlx_parallm.core import Grammar, GrammarState, TextTokenizer

_ALL_BITS = 0xFF


class AfterReasoning:
    """Implements `core.Grammar`: reasoning as the model likes, its end mark, and then a text of `grammar`.

    Args:
        tokenizer: of a model that marks its reasoning.
        begun: the prompt ends inside the reasoning. Else the text either begins with the start mark, or is all grammar.
    """

    def __init__(self, grammar: Grammar, tokenizer: TextTokenizer, begun: bool) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._begun = begun

    def start(self) -> GrammarState:
        return _State(self._grammar.start(), self._tokenizer, self._begun)


class _State:
    """Implements `core.GrammarState`.

    _opening: tokens of the start mark that are still to come; empty within reasoning, and without any
    _tail:    end of what was thought, long enough to hold an end mark that has begun
    """

    def __init__(self, inner: GrammarState, tokenizer: TextTokenizer, begun: bool) -> None:
        assert tokenizer.reasoning is not None
        self._inner = inner
        self._tokenizer = tokenizer
        self._end = tokenizer.reasoning.end.encode()
        self._opening = [] if begun else tokenizer.encode(tokenizer.reasoning.start, add_special_tokens=False)
        self._thinking = begun
        self._tail = b""

    def fill(self, mask: memoryview) -> None:
        """See `core.GrammarState.fill`."""
        bits = mask.cast("B")
        if self._thinking and not self._opening:
            bits[:] = bytes([_ALL_BITS]) * len(bits)
            for token in self._tokenizer.eos_token_ids:
                bits[token // 8] &= ~(1 << token % 8) & _ALL_BITS
            return
        if self._thinking:
            bits[:] = bytes(len(bits))
        else:
            self._inner.fill(mask)
        if self._opening:
            bits[self._opening[0] // 8] |= 1 << self._opening[0] % 8

    def accept(self, token: int) -> None:
        """See `core.GrammarState.accept`."""
        if self._opening and token == self._opening[0]:
            self._thinking = True
            del self._opening[0]
        elif self._thinking:
            self._think(token)
        else:
            self._opening.clear()
            self._inner.accept(token)

    @property
    def ended(self) -> bool:
        return not self._thinking and self._inner.ended

    def _think(self, token: int) -> None:
        thought, found, rest = (self._tail + self._tokenizer.token_bytes(token)).partition(self._end)
        if not found:
            self._tail = thought[max(0, len(thought) - len(self._end) + 1) :]
            return
        self._thinking = False
        # A token seldom holds more than the end of a mark; where it does, the grammar has to take the rest.
        if rest := rest.strip():
            for following in self._tokenizer.encode(rest.decode("utf-8", "replace"), add_special_tokens=False):
                self._inner.accept(following)
