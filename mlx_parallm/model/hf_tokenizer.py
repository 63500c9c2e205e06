"""What the server needs of a Hugging Face tokenizer besides its own methods: a thread-safe codec, and the bytes of each
token."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import tokenizers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.convert_slow_tokenizer import bytes_to_unicode

# -- a codec for many threads --------------------------------------------------------------------

_SAMPLES = ("", "Hello, world!", "  two  spaces\n\n\tand 123 ", "naïve café 日本語 👨‍👩‍👧", "<s></s><|im_end|>")
"""Texts for which a Rust tokenizer must give the same ids with and without its Hugging Face wrapper."""


class Codec(Protocol):
    """Text to token ids and back. Safe to call from any thread."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class FastCodec:
    """The Rust tokenizer inside a fast Hugging Face tokenizer. The wrapper around it is not thread-safe: it changes
    shared settings in each call.

    The batch methods release the interpreter lock while they work; the methods for a single text hold it.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        [text] = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)


class SlowCodec:
    """A tokenizer written in Python, used by one thread at a time.

    Encoding and decoding have separate locks, so that running sequences need not wait while a long prompt is encoded.
    """

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
    """A FastCodec if the tokenizer has a Rust backend that gives the same results without its wrapper."""
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


# -- the bytes of each token ---------------------------------------------------------------------

_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}
_WORD_START = "▁"  # SentencePiece writes a space like this


def token_bytes_of(wrapped: TokenizerWrapper) -> list[bytes] | None:
    """The bytes of every token id; for an added token, its own text. None if they depend on neighbouring tokens, or the
    tokenizer is written in Python.

    Two kinds of decoder give each token fixed bytes: GPT-2's byte-level alphabet, and SentencePiece's, with or without
    byte fallback (`<0xE2>`), whose leading space is kept.
    """
    backend = getattr(wrapped, "backend_tokenizer", None)
    to_bytes = None if backend is None else _token_decoder(json.loads(backend.to_str())["decoder"])
    if backend is None or to_bytes is None:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    all_bytes = [to_bytes("")] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        all_bytes[i] = to_bytes(token)
    for i, token in backend.get_added_tokens_decoder().items():
        all_bytes[i] = token.content.encode()
    return all_bytes


def _token_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes
    replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    of_words = {"Replace", "Fuse"} <= kinds <= _SENTENCEPIECE_STEPS and replaced == [({"String": _WORD_START}, " ")]
    return _sentencepiece_bytes if kinds == {"Metaspace"} or of_words else None


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_WORD_START, " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    """The inverse of GPT-2's printable alphabet. A token with a character outside it stands for its own UTF-8."""
    try:
        return bytes(map(BYTE_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()


BYTE_ALPHABET: Mapping[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The 256 characters in which byte-level tokens are written, and the byte that each stands for."""
