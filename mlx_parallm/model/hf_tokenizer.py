"""What the server needs of a Hugging Face tokenizer besides its own methods: a thread-safe codec, the bytes of each
token, and a lower bound of a text's number of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import tokenizers
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.errors import ContextLengthError

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
    """A tokenizer written in Python, used by one thread at a time.

    Encoding and decoding have separate locks, so that running rows need not wait while a long prompt is encoded.
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


# -- the Rust tokenizer's own description --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """A Rust tokenizer as it describes itself, which takes a tenth of a second for 50,000 tokens.

    steps: its normalizer, pre-tokenizer, model and decoder, as JSON
    vocabulary: the id of each token, added ones too
    added: the text of each added token, by its id
    """

    steps: dict[str, Any]
    vocabulary: dict[str, int]
    added: dict[int, str]


def parts_of(wrapped: TokenizerWrapper) -> Parts | None:
    """None: the tokenizer is written in Python."""
    backend = getattr(wrapped, "backend_tokenizer", None)
    if backend is None:
        return None
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    return Parts(json.loads(backend.to_str()), backend.get_vocab(with_added_tokens=True), added)


# -- the bytes of each token ---------------------------------------------------------------------

_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}
_WORD_START = "▁"  # SentencePiece writes a space like this


def token_bytes_of(parts: Parts) -> list[bytes] | None:
    """The bytes of every token id; for an added token, its own text. None if they depend on neighbouring tokens.

    Two kinds of decoder give each token fixed bytes: GPT-2's byte-level alphabet, and SentencePiece's, with or without
    byte fallback (`<0xE2>`), whose leading space is kept.
    """
    to_bytes = _token_decoder(parts.steps["decoder"])
    if to_bytes is None:
        return None
    all_bytes = [to_bytes("")] * (max(parts.vocabulary.values()) + 1)
    for token, i in parts.vocabulary.items():
        all_bytes[i] = to_bytes(token)
    for i, text in parts.added.items():
        all_bytes[i] = text.encode()
    return all_bytes


def _token_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes] | None:
    steps = _steps(decoder, "decoders")
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes
    if kinds == {"Metaspace"} or ({"Replace", "Fuse"} <= kinds <= _SENTENCEPIECE_STEPS and _replaces_word_start(steps)):
        return _sentencepiece_bytes
    return None


def _replaces_word_start(steps: list[dict[str, Any]]) -> bool:
    replacements = [step for step in steps if step["type"] == "Replace"]
    return [(step["pattern"], step["content"]) for step in replacements] == [({"String": _WORD_START}, " ")]


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


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves; the other 68 take the code points from 256 up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""The 256 characters in which byte-level tokens are written, and the byte that each stands for."""


# -- a lower bound of a text's tokens ------------------------------------------------------------
#
# A token of the vocabulary stands for at most as many characters of the text as it has characters itself. (A byte-level
# token has one character for each byte, and no character has less than one byte.) So a text of C characters has at
# least C / (characters of the longest token) tokens, unless the tokenizer shortens the text before it looks tokens up:
#
# - a normalizer may join characters: NFC and NFKC make one character of at most four (Unicode's longest canonical
#   decomposition), and a replacement may have a content that is shorter than its pattern;
# - a normalizer or pre-tokenizer may remove characters, and a model may drop unknown characters or make one unknown
#   token of a whole run: then there is no bound;
# - an added token may absorb the white space beside it: then white space is not counted;
# - a byte-level vocabulary may lack bytes, which the model drops: then characters with such a byte are not counted.

_JOINED: Mapping[str, int] = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""The largest number of characters that each normalizer joins into one."""
_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
"""Pre-tokenizers that remove nothing. Those of `_MAY_REMOVE` remove only if their behavior is "Removed"."""
_MAY_REMOVE = {"Split", "Punctuation"}
_BYTE_FALLBACK = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class LengthBound:
    """A lower bound of a text's number of tokens, computed from its characters without encoding it.

    per_token: the largest number of characters for which one token stands
    spaces: whether white space counts
    dropped: the UTF-8 first bytes of characters that do not count
    """

    per_token: int
    spaces: bool = True
    dropped: bytes = b""

    def check(self, text: str, at_most: int) -> None:
        """Raises ContextLengthError if `text` must have more than `at_most` tokens."""
        counted = text if self.spaces else "".join(text.split())
        characters = len(counted)
        if self.dropped:
            raw = counted.encode("utf-8", "surrogatepass")
            characters -= len(raw) - len(raw.translate(None, self.dropped))
        tokens = -(-characters // self.per_token)
        if tokens > at_most:
            raise ContextLengthError(
                f"This model's maximum context length is {at_most} tokens, and the prompt has {len(text)} characters, "
                f"which are at least {tokens} tokens. Shorten the prompt."
            )


def length_bound_of(parts: Parts) -> LengthBound | None:
    """The bound for a tokenizer; None if it may encode a text of any length as a few tokens."""
    steps, vocabulary = parts.steps, parts.vocabulary.keys()
    joined, dropped = _joined(steps["normalizer"]), _dropped(steps, vocabulary)
    if joined is None or dropped is None or not _removes_nothing(steps["pre_tokenizer"]):
        return None
    if dropped and joined > 1:  # joining may turn characters that count into one that is dropped
        return None
    absorbs_spaces = any(token["lstrip"] or token["rstrip"] for token in steps["added_tokens"])
    return LengthBound(joined * max(map(len, vocabulary)), not absorbs_spaces, dropped)


def _joined(normalizer: dict[str, Any] | None) -> int | None:
    """The largest number of characters that the normalizer joins into one; None: there is no limit."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        factor = _replacement_factor(step) if step["type"] == "Replace" else _JOINED.get(step["type"])
        if factor is None:
            return None
        most *= factor
    return most


def _replacement_factor(step: dict[str, Any]) -> int | None:
    pattern, content = step["pattern"].get("String"), step["content"]
    return None if pattern is None or not content else -(-len(pattern) // len(content))


def _removes_nothing(pre_tokenizer: dict[str, Any] | None) -> bool:
    return all(
        step["type"] in _KEEPS_ALL or (step["type"] in _MAY_REMOVE and step["behavior"] != "Removed")
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _dropped(parts: dict[str, Any], vocabulary: Collection[str]) -> bytes | None:
    """First bytes of the characters that the model drops; None if it may drop other characters as well."""
    if parts["model"]["type"] not in ("BPE", "Unigram"):
        return None
    if parts["model"].get("byte_fallback"):
        return b"" if vocabulary >= _BYTE_FALLBACK else None  # type: ignore[operator]
    if not _is_byte_level(parts):
        return None
    missing = bytes(byte for letter, byte in BYTE_ALPHABET.items() if letter not in vocabulary)
    return None if any(0x80 <= byte < 0xC0 for byte in missing) else missing


def _is_byte_level(parts: dict[str, Any]) -> bool:
    steps = (*_steps(parts["normalizer"], "normalizers"), *_steps(parts["pre_tokenizer"], "pretokenizers"))
    return any(step["type"] == "ByteLevel" for step in steps)


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder as the Rust tokenizer serialises it."""
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]
