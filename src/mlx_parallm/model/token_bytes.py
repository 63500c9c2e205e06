"""The exact bytes that each token stands for, where the tokenizer's decoder makes that a fact of the token alone."""

from __future__ import annotations

import json
from typing import Any

_SPM_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}
_WORD_START = "▁"  # SentencePiece's mark for a space


def pieces_of(tokenizer: Any) -> list[bytes] | None:
    """Bytes of every token id, special tokens included as their own text; None where decoding needs its neighbours.

    Two kinds of decoder qualify: GPT-2's byte-level alphabet, and SentencePiece's with or without byte fallback
    (`<0xE2>`), whose leading space is kept.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    to_bytes = _per_token_decoder(json.loads(backend.to_str())["decoder"])
    if to_bytes is None:
        return None
    added = {i: token.content.encode() for i, token in backend.get_added_tokens_decoder().items()}
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return [added[i] if i in added else to_bytes(backend.id_to_token(i) or "") for i in range(size)]


def _per_token_decoder(decoder: dict[str, Any] | None) -> Any:
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if kinds == {"Metaspace"} or ({"Replace", "Fuse"} <= kinds <= _SPM_STEPS and _replaces_word_start(steps)):
        return _sentencepiece
    return None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replaces_word_start(steps: list[dict[str, Any]]) -> bool:
    found = [step for step in steps if step["type"] == "Replace"]
    return [(step["pattern"], step["content"]) for step in found] == [({"String": _WORD_START}, " ")]


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_WORD_START, " ").encode()


def _byte_level(token: str) -> bytes:
    """Inverse of GPT-2's printable alphabet; a token with a character outside it stands for its own UTF-8."""
    try:
        return bytes(BYTE_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves; the other 68 take the code points from 256 up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""The 256 characters that byte-level tokens are written with, and the byte that each stands for."""
