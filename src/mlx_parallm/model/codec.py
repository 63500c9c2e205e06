"""Encoding and decoding by many threads at once, whatever kind of Hugging Face tokenizer the model has."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

import tokenizers
from mlx_lm.tokenizer_utils import TokenizerWrapper

_SAMPLES = ("", "Hello, world!", "  two  spaces\n\n\tand 123 ", "naïve café 日本語 👨‍👩‍👧", "<s></s><|im_end|>")
"""Texts for which a fast tokenizer must give the same ids with and without its Hugging Face wrapper."""


class Codec(Protocol):
    """Text to token ids and back. Safe to call from any thread."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class FastCodec:
    """The Rust tokenizer behind a fast Hugging Face tokenizer, without the wrapper, which changes shared settings
    whenever it encodes.

    The batch calls release Python's interpreter lock while they work; the calls for one text hold it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        [text] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)


class SlowCodec:
    """A tokenizer written in Python, one call at a time. Decoding has a lock of its own, so that the text of running
    rows never waits for a long prompt to be encoded."""

    def __init__(self, wrapped: TokenizerWrapper) -> None:
        self._hf = wrapped
        self._encoding, self._decoding = Lock(), Lock()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._encoding:
            ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        with self._decoding:
            text: str = self._hf.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text


def codec_of(wrapped: TokenizerWrapper) -> Codec:
    """The fast one where the tokenizer has a Rust backend and its wrapper adds nothing to it."""
    slow = SlowCodec(wrapped)
    backend: Any = getattr(wrapped, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return slow
    fast = FastCodec(backend)
    return fast if all(_agree(fast, slow, text) for text in _SAMPLES) else slow


def _agree(one: Codec, other: Codec, text: str) -> bool:
    ids = [one.encode(text, special) for special in (True, False)]
    texts = [one.decode(ids[0], skip) for skip in (True, False)]
    same_ids = ids == [other.encode(text, special) for special in (True, False)]
    return same_ids and texts == [other.decode(ids[0], skip) for skip in (True, False)]
