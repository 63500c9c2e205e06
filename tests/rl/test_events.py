"""The stream of training events, and listeners that are slow."""

from __future__ import annotations

import asyncio

from rl.service_rig import settle

from mlx_parallm.rl.events import EventHub

# ---- events -------------------------------------------------------------------------------------


async def test_a_slow_listener_loses_the_oldest_events_is_told_how_many_and_delays_nobody() -> None:
    hub = EventHub()
    slow, quick = hub.listen(), hub.listen()
    seen: list[object] = []
    for number in range(400):
        hub.emit("scored", number=number)
        seen.append((await anext(quick)).data["number"])
    late = hub.listen()
    hub.emit("scored", number=400)
    hub.close()
    assert seen == list(range(400))
    mark, *rest = [event async for event in slow]
    assert (mark.kind, mark.data) == ("events_lost", {"events": 145})
    assert [event.data["number"] for event in rest] == list(range(145, 401))
    assert [event.data["number"] async for event in late] == [400]
    assert [event async for event in hub.listen()] == []


async def test_each_gap_in_a_listeners_events_is_marked_where_it_is() -> None:
    hub = EventHub()
    slow = hub.listen()
    hub.emit("scored", number=0)
    assert (await anext(slow)).data == {"number": 0}
    for first in (1, 259):
        for number in range(first, first + 258):
            hub.emit("scored", number=number)
        assert (await anext(slow)).data == {"events": 2}
        assert [(await anext(slow)).data["number"] for _ in range(256)] == list(range(first + 2, first + 258))


async def test_a_listener_that_is_closed_while_it_waits_ends() -> None:
    hub = EventHub()
    listener = hub.listen()
    waiting = asyncio.create_task(anext(listener, None))
    await settle()
    await listener.aclose()
    assert await waiting is None
    hub.emit("scored")
    assert await anext(listener, None) is None
