"""A grammar that tests write down as sequences of tokens."""

from __future__ import annotations

from mlx_parallm.errors import GrammarError

END = 262


class Words:
    """Any of these sequences of tokens. A stand-in for a compiled grammar."""

    def __init__(self, *words: tuple[int, ...], fails_after: int | None = None) -> None:
        self.words = words
        self.fails_after = fails_after
        self.started = 0

    def start(self) -> Words.State:
        self.started += 1
        return self.State(self)

    class State:
        """A text of these tokens."""

        def __init__(self, grammar: Words) -> None:
            self.grammar = grammar
            self.text: tuple[int, ...] = ()

        def _next(self) -> set[int]:
            at = len(self.text)
            going = [word for word in self.grammar.words if word[:at] == self.text]
            return {word[at] if at < len(word) else END for word in going}

        def fill(self, mask: memoryview) -> None:
            bits = sum(1 << token for token in self._next())
            mask.cast("B")[:] = bits.to_bytes(mask.nbytes, "little")

        def accept(self, token: int) -> None:
            if len(self.text) == self.grammar.fails_after or token not in self._next():
                raise GrammarError("injected")
            self.text += (token,)

        def copy(self) -> Words.State:
            following = type(self)(self.grammar)
            following.text = self.text
            return following

        def forced(self) -> tuple[int, ...]:
            following = self.copy()
            while len(only := following._next()) == 1 and END not in only:
                following.text += tuple(only)
            return following.text[len(self.text) :]

        @property
        def ended(self) -> bool:
            return self._next() <= {END} and self.text in self.grammar.words

        @property
        def free(self) -> bool:
            return False
