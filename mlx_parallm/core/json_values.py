"""Types of values that answers show otherwise than the program has them, because JSON has no such numbers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated

from pydantic import ConfigDict, PlainSerializer


def utc(seconds: float) -> str:
    """Unix seconds as ISO-8601, to the millisecond: `2026-11-03T12:00:00.250Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(value: float | None) -> float | None:
    """None for a number that is not finite."""
    return None if value is None or not math.isfinite(value) else value


ANSWER = ConfigDict(use_attribute_docstrings=True, json_schema_serialization_defaults_required=True)
"""Of dataclasses that are answers, or parts of them: the OpenAPI document has the docstrings below their fields, and
says that all fields are sent."""
UnixTime = Annotated[float, PlainSerializer(utc, return_type=str)]
"""Seconds; a text in answers."""
Figure = Annotated[float, PlainSerializer(finite, return_type=float | None)]
"""A number that may be infinite or NaN; null in answers then."""
