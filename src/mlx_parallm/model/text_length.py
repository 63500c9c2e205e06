"""How few tokens a text can have, told by its length alone: a text that cannot fit is refused before it is encoded.

A token of the vocabulary stands for at most as many characters of the text as it has characters itself, so a text of C
characters has at least C / (the longest token's characters) tokens. A byte-level token has one character for each byte,
and no character has less than one byte, so this holds for it as well. It does not hold where a tokenizer makes a text
shorter before it looks tokens up:

- a normalizer may join characters: NFC and NFKC make one of at most four (Unicode's longest canonical decomposition),
  a replacement one of as many as its pattern has;
- a normalizer or pre-tokenizer may remove characters, and a model may drop those that it does not know, or make one
  unknown token of a whole run: then nothing can be told, and the bound is None;
- an added token may swallow the white space beside it: then white space is not counted;
- a byte-level vocabulary may lack bytes, which the model drops: then characters with such a byte are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_parallm.model.token_bytes import BYTE_ALPHABET

_JOINED: Mapping[str, int] = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Characters of a text that a normalizer makes one of, at the most."""
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
"""Pre-tokenizers that remove nothing; those of `_MAY_REMOVE` remove nothing unless their behavior says so."""
_MAY_REMOVE = {"Split", "Punctuation"}
_FALLBACK = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class TextLength:
    """`per_token`: characters that one token stands for, at the most. `spaces`: whether white space counts. `dropped`:
    first bytes, in UTF-8, of characters that do not count."""

    per_token: int
    spaces: bool = True
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least."""
        counted = text if self.spaces else "".join(text.split())
        characters = len(counted)
        if self.dropped:
            raw = counted.encode("utf-8", "surrogatepass")
            characters -= len(raw) - len(raw.translate(None, self.dropped))
        return -(-characters // self.per_token)


def text_length_of(tokenizer: TokenizerWrapper) -> TextLength | None:
    """None where the tokenizer may make any text short."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True).keys()
    joined, dropped = _joined(parts["normalizer"]), _dropped(parts, vocabulary)
    if joined is None or dropped is None or not _removes_nothing(parts["pre_tokenizer"]):
        return None
    if dropped and joined > 1:  # it may make a character that is dropped of some that are not
        return None
    swallows = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    return TextLength(joined * max(map(len, vocabulary)), not swallows, dropped)


def _joined(normalizer: dict[str, Any] | None) -> int | None:
    """Characters that become one, at the most; None: any number."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        factor = _replaced(step) if step["type"] == "Replace" else _JOINED.get(step["type"])
        if factor is None:
            return None
        most *= factor
    return most


def _replaced(step: dict[str, Any]) -> int | None:
    pattern, content = step["pattern"].get("String"), step["content"]
    return None if pattern is None or not content else -(-len(pattern) // len(content))


def _removes_nothing(pre_tokenizer: dict[str, Any] | None) -> bool:
    return all(
        step["type"] in _KEEPING or (step["type"] in _MAY_REMOVE and step["behavior"] != "Removed")
        for step in _steps(pre_tokenizer, "pretokenizers")
    )


def _dropped(parts: dict[str, Any], vocabulary: Collection[str]) -> bytes | None:
    """First bytes of the characters that the model drops; None where it may drop others as well."""
    if parts["model"]["type"] not in ("BPE", "Unigram"):
        return None
    if parts["model"].get("byte_fallback"):
        return b"" if vocabulary >= _FALLBACK else None  # type: ignore[operator]
    if not _byte_level(parts):
        return None
    lacking = bytes(byte for letter, byte in BYTE_ALPHABET.items() if letter not in vocabulary)
    return None if any(0x80 <= byte < 0xC0 for byte in lacking) else lacking


def _byte_level(parts: dict[str, Any]) -> bool:
    every = (*_steps(parts["normalizer"], "normalizers"), *_steps(parts["pre_tokenizer"], "pretokenizers"))
    return any(step["type"] == "ByteLevel" for step in every)


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]
