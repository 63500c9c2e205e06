"""Cards as answers: what they are called there, and what they leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from mlx_parallm.core.adapters import AdapterRef, AdapterText
from mlx_parallm.core.json_values import ANSWER, NOT_SENT, Figure, JsonObject, UnixTime, sent_as


@dataclass(frozen=True, slots=True)
class Card:
    """A card."""

    __pydantic_config__ = ANSWER

    adapter: AdapterText
    """The adapter."""
    best: AdapterText | None = field(metadata=sent_as("best_lora"))
    """The best version."""
    at: UnixTime
    """The time."""
    loss: Figure | None = None
    """The loss."""
    secret: str = field(default="", metadata=NOT_SENT)
    """A secret."""
    data: JsonObject = field(default_factory=dict)
    """Details."""


REF = AdapterRef("math", 2)
CARD = Card(REF, None, 1_800_000_000.25, math.nan, "s", {"a": (1, math.inf), "ref": REF})
SENT = {
    "lora_adapter": "math@2",
    "best_lora": None,
    "at": "2027-01-15T08:00:00.250Z",
    "loss": None,
    "data": {"a": [1, None], "ref": "math@2"},
}


def test_what_json_lacks_has_a_form_and_fields_are_renamed_or_left_out():
    assert TypeAdapter(Card).dump_python(CARD, mode="json", by_alias=True) == SENT
