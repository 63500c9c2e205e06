"""Random changes to inputs: of bytes, of text with the words of a format, of JSON values, of safetensors, and of the
files of a folder. Each takes an input and a random generator, and returns another input."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]

LONGEST = 1 << 16
"""Bytes of an input. Work that grows with the square of the length takes seconds at this one."""
_NUMBERS = (0, -1, 1, 2, 64, 255, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"))
_TEXTS = ("", " ", "\x00", "\ud800", "é", "\u2028", "ﬀ", "🏴", "../x", "/etc/passwd", "%0a", "a" * 300, "9" * 5000)
_PLAIN = (None, True, False, *_NUMBERS, *_TEXTS, [], {}, [[]], [None], {"": 0})


def bytes_mutated(data: bytes, rng: Random, words: Sequence[bytes] = ()) -> bytes:
    """One to four small changes. `words`: what may be inserted."""
    for _ in range(rng.randint(1, 4)):
        begin = rng.randint(0, len(data))
        end = min(len(data), begin + rng.choice((0, 1, 1, 2, 8, 64)))
        before, part, after = data[:begin], data[begin:end], data[end:]
        match rng.randrange(6):
            case 0:
                data = before + after
            case 1:
                data = before + rng.randbytes(len(part) or 1) + after
            case 2 if data:
                data = before + data[(copied := rng.randrange(len(data))) : copied + rng.randint(1, 64)] + part + after
            case 3 if words:
                data = before + rng.choice(words) + rng.choice((part, b"")) + after
            case 4:
                most = max(1, min(4096, (LONGEST - len(data)) // max(1, len(part))))
                data = before + part * rng.choice((2, 3, most)) + after
            case _ if part:
                data = before + bytes([part[0] ^ 1 << rng.randrange(8)]) + part[1:] + after
    return data[:LONGEST]


def with_words(*words: str | bytes) -> Mutate:
    """Of text with these words."""
    known = [word if isinstance(word, bytes) else word.encode() for word in words if word]
    return lambda data, rng: bytes_mutated(data, rng, known)


# -- JSON ----------------------------------------------------------------------------------------


def json_with(names: Sequence[str], words: Sequence[Any] = ()) -> Mutate:
    """Of JSON whose objects may have these names, and whose values mean something if they are one of `words`."""
    values = (*_PLAIN, *words, *words)

    def mutated(data: bytes, rng: Random) -> bytes:
        with suppress(ValueError, RecursionError):
            if rng.randrange(12):
                value = json.loads(data)
                for _ in range(rng.randint(1, 3)):
                    value = _changed(value, rng, names, values)
                return json.dumps(value, ensure_ascii=True).encode()[:LONGEST]
        return bytes_mutated(data, rng)

    return mutated


def _changed(value: Any, rng: Random, names: Sequence[str], values: Sequence[Any]) -> Any:
    """The value with one change, at its top or anywhere below it."""
    inner = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inner or not rng.randrange(4):
        return _replaced(value, rng, names, values)
    key = rng.choice(list(inner))
    value[key] = _changed(value[key], rng, names, values)
    return value


def _replaced(value: Any, rng: Random, names: Sequence[str], values: Sequence[Any]) -> Any:
    new = rng.choice(values)
    match rng.randrange(8):
        case 0 | 1 if isinstance(value, dict):
            return {**value, rng.choice(names) if names else "x": new}
        case 2 if isinstance(value, dict) and value:
            return {name: inner for name, inner in value.items() if name != rng.choice(list(value))}
        case 0 | 1 if isinstance(value, list):
            return [*value, new] if rng.randrange(2) or not value else [*value, *value[:8]] * rng.choice((1, 2, 60))
        case 2 if isinstance(value, list):
            return value[: rng.randint(0, len(value))]
        case 0 | 1 if isinstance(value, str):
            return bytes_mutated(value.encode(errors="replace"), rng).decode(errors="replace")
        case 3:
            return [value] if rng.randrange(2) else {rng.choice(names) if names else "x": value}
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            return value + rng.choice((-1, 1)) if value == value else 0
        case 5 if not rng.randrange(8):
            for _ in range(900):
                value = [value]
            return value
    return new


# -- files ---------------------------------------------------------------------------------------


def safetensors_with(names: Sequence[str]) -> Mutate:
    """Of a safetensors file: mostly its header, whose length stays right."""
    of_header = json_with(names, ("F32", "BF16", "F16", "I64", "U8", [4, 16], [0, 256]))

    def mutated(data: bytes, rng: Random) -> bytes:
        if len(data) < 8 or not rng.randrange(6):
            return bytes_mutated(data, rng)
        (length,) = struct.unpack("<Q", data[:8])
        header, tensors = data[8 : 8 + length], data[8 + length :]
        if rng.randrange(3):
            header = of_header(header, rng)
        else:
            tensors = bytes_mutated(tensors, rng)
        return struct.pack("<Q", len(header)) + header + tensors

    return mutated


def packed(files: Mapping[str, bytes]) -> bytes:
    """The files of a folder as one input: a line with their names and lengths, then their bytes."""
    return json.dumps({name: len(data) for name, data in files.items()}).encode() + b"\n" + b"".join(files.values())


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of an input; none if it is not what `packed` makes."""
    line, _, rest = data.partition(b"\n")
    files: dict[str, bytes] = {}
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        for name, length in json.loads(line).items():
            files[name], rest = rest[:length], rest[length:]
    return files


def of_files(kinds: Mapping[str, Mutate]) -> Mutate:
    """Of a folder: one of its files. `kinds`: by the end of a name."""

    def mutated(data: bytes, rng: Random) -> bytes:
        files = unpacked(data)
        if not files:
            return bytes_mutated(data, rng)
        name = rng.choice(list(files))
        mutate = next((mutate for end, mutate in kinds.items() if name.endswith(end)), bytes_mutated)
        files[name] = mutate(files[name], rng)
        return packed(files)

    return mutated


def after_first_line(mutate: Mutate, lines: Sequence[str] = ()) -> Mutate:
    """Of what follows the first line. `lines`: what may take that one's place."""

    def mutated(data: bytes, rng: Random) -> bytes:
        line, _, rest = data.partition(b"\n")
        if lines and not rng.randrange(5):
            line = rng.choice(lines).encode()
        return line + b"\n" + mutate(rest, rng)

    return mutated
