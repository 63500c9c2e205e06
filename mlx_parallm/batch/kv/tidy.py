"""Resizes the arenas of the KV pool between units, a part at a time, so that rows wait for it for a short time only."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.batch.kv.groups import Store
from mlx_parallm.batch.kv.memory import BlockMemory
from mlx_parallm.batch.kv.sizing import is_short, places_kept_in_excess, size_for_next_rows
from mlx_parallm.model.device import is_out_of_memory

_EVICTED_BLOCKS = 512
"""Cached blocks of each group that are dropped at a time while the machine is short of memory."""
_LARGEST_SLACK = 1 / 8
"""Free memory that arenas keep then, as a share of what rows use. With less, they would be resized all the time."""


def tidy(memory: BlockMemory, most_bytes: int, quiet: bool, pausing: bool = False) -> bool:
    """Grows arenas that are short of free places, so that the next row need not wait for that. Shrinks arenas of which
    much is unused, after the blocks in their highest places have moved.

    Cached prefixes are evicted first where the arenas hold memory that was reserved meanwhile. While the machine is
    short of memory, all of them are.

    Args:
        most_bytes: bytes that may be copied in each group now. At least one block is moved, or one layer resized.
        quiet: no row has opened for a while.
        pausing: do only what is urgent, because the last row has ended just now and the next may come at once, or rows
            have waited already. Urgent: an arena is short of places, or memory was reserved meanwhile.

    Returns:
        Whether more is left to do.
    """
    excess = memory.nbytes - memory.device.pool_limit(alone=False)
    reserved, evicted = excess > 0, 0
    if not memory.device.keeps_prefixes:
        evicted = sum(memory.evict(number, _EVICTED_BLOCKS) for number in range(len(memory.stores)))
        quiet = quiet or memory.bytes_free > _LARGEST_SLACK * memory.bytes_used
    for number, group in enumerate(memory.stores):
        wanted = max(0, -(-excess // group.arena.block_bytes))
        memory.evict(number, wanted - group.places.free)
        excess -= min(wanted, group.places.free) * group.arena.block_bytes
    groups = [group for group in memory.stores if reserved or not pausing or is_short(group)]
    left = [_tidy_group(memory, group, most_bytes, quiet) for group in groups]
    return any(left) or evicted > 0


def _tidy_group(memory: BlockMemory, group: Store, most_bytes: int, quiet: bool) -> bool:
    size = _wanted_size(memory, group, quiet)
    if size > group.places.total:
        return not memory.resize(group, size, most_bytes) and not memory.device_refused
    if not _shrunk(group, most_bytes):
        return True
    if size == group.places.total or not memory.move_below(group, size, max(1, most_bytes // group.arena.block_bytes)):
        return False
    if group.places.moves_below(size, 1):
        return True
    group.places.resize(size)
    return not _shrunk(group, most_bytes)


def _wanted_size(memory: BlockMemory, group: Store, quiet: bool) -> int:
    """How many places an arena should have now. It does not grow while the device is out of memory."""
    places = group.places
    room = memory.device.pool_limit(alone=False) - memory.nbytes
    if room < 0:
        return places.total - places.free if places.free > places_kept_in_excess(places.total) else places.total
    growth = 0 if memory.device_refused else room // group.arena.block_bytes
    return size_for_next_rows(group, quiet, places.total + growth)


def _shrunk(group: Store, most_bytes: int) -> bool:
    """Shrinks some layers of an arena to its places. Returns whether no more can be done."""
    try:
        return group.arena.resize(group.places.total, most_bytes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        mx.clear_cache()
        return True
