"""How many places an arena has: enough for the rows that open next, and few that nobody needs."""

from __future__ import annotations

from mlx_parallm.batch.kv.groups import Store

_SPARE_BLOCKS, _IDLE_SPARE_BLOCKS = 4, 16
"""The least number of free places for the next rows: while rows run, and without any."""

_SPARE_BYTES = 256 << 20
"""The most bytes of these, because a place for recurrent states can be large. One place is kept in any case."""

_SPARE_BYTES_FOR_CACHE = 1 << 30


def spare_places(group: Store) -> int:
    """How many free places an arena gets for the next rows.

    What rows do not use counts against them, so their part is small: a sixteenth, or a few. The cache grows until it
    fills its memory, and the arena copies itself whenever it grows: so the cache gets as many places again, up to a
    gigabyte or half of what it has. With a fixed number, a large arena would be copied as often as a small one.
    """
    places = group.places
    few = _few(group, _SPARE_BLOCKS if places.used else _IDLE_SPARE_BLOCKS)
    for_cache = min(places.cached, max(_SPARE_BYTES_FOR_CACHE // group.arena.block_bytes, places.cached // 2))
    return max(few, places.used // 16 + for_cache)


def _few(group: Store, places: int) -> int:
    """So many places, or as many as `_SPARE_BYTES` hold."""
    return min(places, max(1, _SPARE_BYTES // group.arena.block_bytes))


def is_short(group: Store) -> bool:
    """Whether so few places are free that the next rows may have to wait for more."""
    return group.places.free < max(_few(group, _IDLE_SPARE_BLOCKS), spare_places(group) // 16)


def places_kept_in_excess(total: int) -> int:
    """How many free places an arena may keep while the pool takes more than its share of the memory."""
    return total // 32


def size_for_next_rows(group: Store, quiet: bool, most: int) -> int:
    """How many places an arena should have, if it may have up to `most`.

    Growth that has begun is completed. The arena grows when an eighth of the spare places is left, or half of them
    if no row runs, and shrinks when it has twice as many, because either copies all of its content.

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
    if places.free > max(_few(group, _IDLE_SPARE_BLOCKS) if places.cached else 0, 2 * spare):
        return busy + spare
    if busy and places.free < spare // (8 if places.used else 2):
        return max(places.total, min(most, busy + spare))
    return places.total
