"""The stream of training events, and listeners that are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from mlx_parallm.rl.events import EventHub, Listener
from mlx_parallm.rl.status import TrainingEvent

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


async def test_a_listener_that_comes_back_gets_what_it_has_missed() -> None:
    hub = EventHub()
    first = hub.listen()
    for number in range(1, 301):
        hub.emit("scored", number=number)
    read = [event async for event in _some(first, 3)]
    assert [event.kind for event in read] == ["events_lost", "scored", "scored"]
    again = [event.data["number"] async for event in _some(hub.listen(read[-1].id), 254)]
    assert again == list(range(47, 301))
    hub.emit("scored", number=301)
    late = [event async for event in _some(hub.listen(read[1].id), 256)]
    assert late[0].data == {"number": 46}, "the 256 newest are kept"
    hub.emit("scored", number=302)
    late = [event async for event in _some(hub.listen(read[1].id), 257)]
    assert (late[0].kind, late[0].data, late[0].id) == ("events_lost", {"events": 1}, "")
    assert [event.data["number"] for event in late[1:]] == list(range(47, 303))


async def test_of_an_earlier_start_it_is_not_known_how_many_events_were_lost() -> None:
    earlier, hub = EventHub(), EventHub()
    reader = earlier.listen()
    earlier.emit("scored")
    before = await anext(reader)
    reader = hub.listen()
    hub.emit("scored", number=1)
    own = await anext(reader)
    for said in (before.id, "nonsense", own.id.replace("-1", "-²")):
        lost, event = [event async for event in _some(hub.listen(said), 2)]
        assert (lost.kind, lost.data, event.data) == ("events_lost", {"events": None}, {"number": 1})


async def _some(listener: Listener, count: int) -> AsyncIterator[TrainingEvent]:
    for _ in range(count):
        yield await asyncio.wait_for(anext(listener), 5)
