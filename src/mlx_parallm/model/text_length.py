"""How few tokens a text can have, told by its length alone: a text that cannot fit is refused before it is encoded.

A token of the vocabulary stands for at most as many characters of the text as it has characters itself, so a text of C
characters has at least C / (the longest token's characters) tokens. A byte-level token has one character for each byte,
and no character has less than one byte, so this holds for it as well. It does not hold where a tokenizer makes a text
shorter before it looks tokens up:

- a normalizer may join characters: NFC and NFKC make one of at most four (Unicode's longest canonical decomposition),
  a replacement one of as many as its pattern has;
- a normalizer or pre-tokenizer may remove characters, and a model may drop those that it does not know, or make one
  unknown token of a whole run: then nothing can be told, and the bound is None;
- an added token may swallow the white space beside it: then white space is not counted.
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
    """`per_token`: characters that one token stands for, at the most. `spaces`: whether white space counts."""

    per_token: int
    spaces: bool = True

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least."""
        characters = len(text) if self.spaces else len("".join(text.split()))
        return -(-characters // self.per_token)


def text_length_of(tokenizer: TokenizerWrapper) -> TextLength | None:
    """None where the tokenizer may make any text short."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True).keys()
    joined = _joined(parts["normalizer"])
    if joined is None or not _removes_nothing(parts["pre_tokenizer"]) or not _keeps_all(parts, vocabulary):
        return None
    swallows = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    return TextLength(joined * max(map(len, vocabulary)), spaces=not swallows)


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


def _keeps_all(parts: dict[str, Any], vocabulary: Collection[str]) -> bool:
    """Whether the model has a token for every character, or for each of its bytes."""
    if parts["model"]["type"] not in ("BPE", "Unigram"):
        return False
    if parts["model"].get("byte_fallback"):
        return vocabulary >= _FALLBACK  # type: ignore[operator]
    return _byte_level(parts) and vocabulary >= BYTE_ALPHABET  # type: ignore[operator]


def _byte_level(parts: dict[str, Any]) -> bool:
    every = (*_steps(parts["normalizer"], "normalizers"), *_steps(parts["pre_tokenizer"], "pretokenizers"))
    return any(step["type"] == "ByteLevel" for step in every)


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]
