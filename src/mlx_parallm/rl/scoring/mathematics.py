"""Scorers of mathematical answers, through math-verify. 0 or 1; an answer that was cut off scores 0.

The last expression of the text is its answer, unless there is a \\boxed{} one. math-verify turns no text into code but
numbers and operators. Its own time limit makes an expression that takes too long a wrong one; it needs the main thread.
"""

from __future__ import annotations

from typing import Any

import math_verify

from mlx_parallm.rl.scoring import fields
from mlx_parallm.rl.scoring.sample import Sample

_LIMIT_S = 2
_MATH_MARKS = ("$", "\\(", "\\[", "\\boxed")


def gsm8k(sample: Sample) -> float:
    """Whether the text's number is `metadata.answer`'s: what follows the last `####`, else the last one."""
    return _equal(sample, fields.number(sample.metadata), sample.text.rpartition("####")[2])


def mathematics(sample: Sample) -> float:
    """Whether the text's answer equals `metadata.answer` (LaTeX, with or without $, or a number), or is its words."""
    gold = fields.answer(sample.metadata)
    if sample.ended and sample.text.strip() == gold.strip():
        return 1.0
    return _equal(sample, gold, sample.text)


def _equal(sample: Sample, gold: str, text: str) -> float:
    wanted = _marked(gold)
    if not wanted:
        raise ValueError("metadata.answer is no mathematical expression that math-verify can read")
    if not sample.ended:
        return 0.0
    given = _parsed(text) or _marked(text)
    return float(math_verify.verify(wanted, given, timeout_seconds=_LIMIT_S))


def _marked(text: str) -> list[Any]:
    """What a text means that may be LaTeX as a whole, without the marks that say so."""
    return _parsed(text if any(mark in text for mark in _MATH_MARKS) else f"${text.strip()}$")


def _parsed(text: str) -> list[Any]:
    """Expressions, then their text; empty where there are none."""
    return list(math_verify.parse(text, parsing_timeout=_LIMIT_S))
