"""How many requests each adapter version gets, and which part of those that name no adapter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_parallm.core import BASE_ADAPTER, AdapterRef
from mlx_parallm.server.services import Services


@dataclass(frozen=True, slots=True)
class Traffic:
    """`requests`: that each version got since the server started; those of `BASE_ADAPTER` had no adapter.
    `unnamed_shares`: the share that each version gets now of the requests that name no adapter, 0 to 1."""

    requests: Counter[AdapterRef]
    unnamed_shares: Mapping[AdapterRef, float]

    @classmethod
    def of(cls, services: Services) -> Traffic:
        return cls(services.metrics.adapters.requests(), _unnamed_shares(services))


def _unnamed_shares(services: Services) -> Mapping[AdapterRef, float]:
    """While two versions of an adapter are compared, they share what its name gets."""
    cards = services.training.competition.cards(services.key.reader) if services.training else ()
    compared = {card.adapter: card for card in cards if card.verdict == "running"}
    shares: defaultdict[AdapterRef, float] = defaultdict(float)
    for selector, share in services.adapters.route().items():
        if selector == BASE_ADAPTER.name:
            shares[BASE_ADAPTER] += share
        elif (card := compared.get(selector)) is not None:
            shares[card.live] += share * (1 - card.share)
            shares[card.candidate] += share * card.share
        else:
            shares[services.adapters.find(selector).ref] += share
    return shares
