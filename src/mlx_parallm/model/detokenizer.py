"""Token ids to text as they come, one detokenizer for each sequence."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mlx_parallm.model.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 16
"""Tokens whose text the general method holds back: a character has at most four, so longer ones are no character."""
_CONTEXT = 6
"""Prompt tokens that the general method decodes before the first generated one, to see how they join."""


class Detokenizer:
    """Turns generated ids into text: what `add` and `finish` return, joined, is the sequence's text.

    Special tokens add nothing, except those of `spelled`, which are text. A first token that begins with a space keeps
    it. Where each token is a fixed run of bytes (byte-level BPE, SentencePiece), joined text equals
    `Tokenizer.decode(ids, skip_special_tokens=True)` apart from those and SentencePiece's leading space; `prompt_ids`
    matters only to other tokenizers.
    """

    __slots__ = ("_spelled", "_stream", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), spelled: frozenset[int] = frozenset()
    ) -> None:
        pieces = tokenizer.text_pieces
        self._stream = _ByteStream(pieces) if pieces is not None else _PrefixStream(tokenizer, prompt_ids)
        self._tokenizer = tokenizer
        self._spelled = spelled

    def add(self, token_id: int) -> str:
        """Text completed by this token; empty while a UTF-8 character is incomplete."""
        if token_id in self._spelled:
            return self._stream.finish() + self._tokenizer.token_bytes(token_id).decode()
        return self._stream.add(token_id)

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was never completed. Call last."""
        return self._stream.finish()


class _ByteStream:
    """An incremental UTF-8 decoder over each token's own bytes."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token_id: int) -> str:
        # A padded vocabulary has ids without a token: they add nothing.
        return self._decode(self._pieces[token_id]) if token_id < len(self._pieces) else ""

    def finish(self) -> str:
        return self._decode(b"", True)


class _PrefixStream:
    """For decoders that look at neighbours: the text of the last few tokens with, less without, the new ones.

    ids:  … | start … shown | shown …        `start`: where decoding begins, for context
                                             `shown`: ids before it have been returned as text
    """

    __slots__ = ("_ids", "_shown", "_start", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._start = 0
        self._shown = len(self._ids)

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        held = len(self._ids) - self._shown
        incomplete = (not text or text.endswith(_REPLACEMENT)) and held < _MOST_HELD
        return "" if incomplete else self._show(text)

    def finish(self) -> str:
        return self._show(self._new_text())

    def _show(self, text: str) -> str:
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
