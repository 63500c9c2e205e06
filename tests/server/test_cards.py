"""Cards as answers: what they are called there, what they leave out, and how they are described."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from mlx_parallm.core.adapters import AdapterRef, AdapterText
from mlx_parallm.core.json_values import ANSWER, NOT_SENT, Figure, JsonObject, UnixTime, fields_of, sent_as


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerCard(Card):
    """A card with more."""

    secret: str
    """No secret any more."""
    more: int
    """More."""


REF = AdapterRef("math", 2)
CARD = Card(REF, None, 1_800_000_000.25, math.nan, "s", {"a": (1, math.inf), "ref": REF})
SENT = {
    "lora_adapter": "math@2",
    "best_lora": None,
    "at": "2027-01-15T08:00:00.250Z",
    "loss": None,
    "data": {"a": [1, None], "ref": "math@2"},
}


def sent(card):
    return TypeAdapter(type(card)).dump_python(card, mode="json", by_alias=True)


def test_what_json_lacks_has_a_form_and_fields_are_renamed_or_left_out():
    assert sent(CARD) == SENT


def test_a_larger_card_has_the_fields_of_another():
    larger = LargerCard(**{**fields_of(CARD), "secret": "told"}, more=3)
    assert sent(larger) == {**SENT, "secret": "told", "more": 3}


def test_fields_are_described_where_they_are_declared_and_all_are_sent():
    schema = TypeAdapter(LargerCard).json_schema(mode="serialization")
    assert {name: said["description"] for name, said in schema["properties"].items()} == {
        "lora_adapter": "The adapter.",
        "best_lora": "The best version.",
        "at": "The time.",
        "loss": "The loss.",
        "secret": "No secret any more.",
        "data": "Details.",
        "more": "More.",
    }
    assert set(schema["required"]) == set(schema["properties"])
