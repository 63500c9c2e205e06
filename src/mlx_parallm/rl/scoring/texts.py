"""Scorers of plain text. In [0, 1]; where the answer must be complete, one that was cut off scores 0."""

from __future__ import annotations

import json
import math

from mlx_parallm.rl.scoring import fields
from mlx_parallm.rl.scoring.sample import Sample


def exact(sample: Sample) -> float:
    """1 if the text, stripped, is `metadata.answer`, stripped, and the sequence ended by itself."""
    return float(sample.ended and sample.text.strip() == fields.answer(sample.metadata).strip())


def regex(sample: Sample) -> float:
    r"""1 if `metadata.pattern` is found anywhere in the text (`re.search`), however the sequence ended.

    `\A` and `\Z` anchor it to the whole.
    """
    return float(fields.pattern(sample.metadata).search(sample.text) is not None)


def json_schema(sample: Sample) -> float:
    """1 if the whole text is JSON that `metadata.schema` takes, and the sequence ended by itself."""
    validator = fields.schema(sample.metadata)
    try:
        value = json.loads(sample.text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return 0.0
    return float(sample.ended and validator.is_valid(value))


def length(sample: Sample) -> float:
    """exp(-ln²(n / target)) for a completion of n tokens: 1 at `metadata.target_length`, .62 at half and at twice it.

    0 where the sequence was cut off: it has no length of its own.
    """
    if not sample.ended or not sample.completion_tokens:
        return 0.0
    return math.exp(-(math.log(sample.completion_tokens / fields.target_length(sample.metadata)) ** 2))


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
