"""`words`: single turn. A sentence is to be classified with one word."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from mlx_parallm.core import CollectionSpec
from mlx_parallm.rl.environments.protocol import Task

_ADJECTIVES = {
    "positive": "superb lovely wonderful excellent delightful amazing brilliant charming fantastic pleasant great "
    "beautiful impressive splendid perfect enjoyable",
    "negative": "dull awful terrible horrible dreadful boring miserable disappointing unpleasant poor bad ugly weak "
    "dismal annoying tedious",
}
_THINGS = ("film", "hotel", "meal", "book", "concert", "garden", "party", "journey")


class Words:
    """Each task is a sentence such as "The film was dull.", and 1 is the reward for its class as the only word."""

    def tasks(self, seed: int) -> Iterator[Task]:
        """Every sentence comes once before any comes again, positive and negative ones in turns: an update from one
        kind would teach one answer to everything."""
        for epoch in itertools.count():
            dice = random.Random(f"{seed}/{epoch}")
            sides = [_shuffled(kind, dice) for kind in _ADJECTIVES]
            yield from itertools.chain.from_iterable(zip(*sides, strict=True))


def _shuffled(kind: str, dice: random.Random) -> list[Task]:
    pairs = list(itertools.product(_THINGS, _ADJECTIVES[kind].split()))
    dice.shuffle(pairs)
    return [_task(thing, adjective, kind) for thing, adjective in pairs]


def _task(thing: str, adjective: str, kind: str) -> Task:
    text = f"The {thing} was {adjective}. Positive or negative? Answer with one word."
    pattern = rf"(?i)\A\W*{kind}\W*\Z"
    return Task(({"role": "user", "content": text},), CollectionSpec("regex", {"pattern": pattern}))
