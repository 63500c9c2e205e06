"""How many places an arena has: enough for the rows that open next, and few that nobody needs."""

from __future__ import annotations

from mlx_parallm.batch.kv.groups import LayerGroup

_SPARE_BLOCKS, _IDLE_SPARE_BLOCKS = 4, 16
"""The least number of free places for the next rows: while rows run, and without any."""


def spare_places(group: LayerGroup) -> int:
    """How many free places are kept for the next rows: a sixteenth, but not less than a few."""
    places = group.places
    return max(_SPARE_BLOCKS if places.used else _IDLE_SPARE_BLOCKS, (places.used + places.cached) // 16)


def places_kept_in_excess(total: int) -> int:
    """How many free places an arena may keep while the pool takes more than its share of the memory."""
    return total // 32


def size_for_next_rows(group: LayerGroup, quiet: bool, most: int) -> int:
    """How many places an arena should have, if it may have up to `most`.

    Growth that has begun is completed. The arena grows by half of the spare places or more, and shrinks when it has
    half as many again, because either copies all of its content.

    Args:
        quiet: no row has opened for a while. Then rows hold little more than they use, and without rows and cached
            prefixes nothing is held.
    """
    places = group.places
    busy = places.used + places.cached
    if places.total < group.arena.goal <= most:
        return group.arena.goal
    if quiet and (places.used or not places.cached):
        return min(places.total, busy + places.used // 16)
    spare = spare_places(group)
    if places.free > max(_IDLE_SPARE_BLOCKS, spare + spare // 2):
        return busy + spare
    if busy and places.free < spare // 2:
        return max(places.total, min(most, busy + spare))
    return places.total
