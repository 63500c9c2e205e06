"""Stored responses: how they are continued, retrieved and deleted, and how many are kept."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.asking import answered, eventually, fault, refusal
from server.test_disconnect import post

from mlx_parallm.server.api.responses.store import ResponseStore, StoredResponse

URL = "/v1/responses"


async def respond(client, **body):
    return await answered(client, URL, {"input": "hi", **body})


async def refused(asked):
    return (await refusal(asked, 404, code="response_not_found"))["param"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued(client, engine, stream):
    engine.text = "A"
    first = await respond(client, input="1", instructions="be kind")
    response = await client.post(URL, json={"input": "2", "previous_response_id": first["id"], "stream": stream})
    assert engine.prompt_text == "u:1\na:A\nu:2\na:"
    second = response.headers["x-request-id"]
    got = await respond(client, input="3", previous_response_id=second, instructions="be brief")
    assert got["previous_response_id"] == second
    assert engine.prompt_text == "s:be brief\nu:1\na:A\nu:2\na:A\nu:3\na:"


async def test_deleting_an_earlier_turn_leaves_later_ones_whole(client, engine):
    engine.text = "A"
    first = await respond(client, input="1")
    second = await respond(client, input="2", previous_response_id=first["id"])
    deleted = await client.delete(f"{URL}/{first['id']}")
    assert (deleted.status_code, deleted.json()) == (200, {"id": first["id"], "object": "response", "deleted": True})
    await respond(client, input="3", previous_response_id=second["id"])
    assert engine.prompt_text == "u:1\na:A\nu:2\na:A\nu:3\na:"
    again = client.post(URL, json={"input": "x", "previous_response_id": first["id"]})
    assert await refused(again) == "previous_response_id"
    assert await refused(client.delete(f"{URL}/{first['id']}")) == "response_id"


async def test_store_false_stores_nothing(client):
    got = await respond(client, store=False)
    assert got["store"] is False
    assert await refused(client.get(f"{URL}/{got['id']}")) == "response_id"
    assert len(client.app.state.services.responses) == 0


async def test_a_response_whose_client_left_is_not_stored(serving, engine):
    engine.pause_before = 2
    async with serving() as server:
        _, writer = await post(server.port, {"input": "hi", "stream": True}, URL)
        await engine.paused.wait()
        writer.close()
        await eventually(lambda: not engine.live)
        services = server.app.state.services
        assert (engine.aborted, services.gate.held, len(services.responses)) == (1, 0, 0)


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3"])
async def test_the_events_of_a_stored_response_are_refused_with_the_reason(client, query):
    got = await respond(client)
    response = await client.get(f"{URL}/{got['id']}?{query}")
    assert (response.status_code, fault(response)["param"]) == (400, query.partition("=")[0])
    assert "leave it out to get the whole response" in fault(response)["message"]
    assert (await client.get(f"{URL}/{got['id']}?stream=false")).json() == got


def stored(size):
    return StoredResponse(b"x" * size, b"")


def test_no_key_drops_the_responses_of_one_that_holds_less():
    store = ResponseStore(5, 100)
    store.put("mine", replace(stored(10), owner="mine"))
    for number in range(9):
        store.put(f"many-{number}", replace(stored(1), owner="other"))
    for number in range(9):
        store.put(f"large-{number}", replace(stored(30), owner="other"))
    assert store.find("mine") is not None
    assert store.find("large-8") is not None
    assert store.find("large-0") is None


@given(st.lists(st.tuples(st.sampled_from(["put", "find", "forget"]), st.integers(0, 12)), max_size=60))
def test_the_store_is_bounded_and_keeps_the_most_recently_used(steps):
    most, most_bytes = 3, 20
    store, model = ResponseStore(most, most_bytes), {}
    for number, (step, value) in enumerate(steps):
        if step == "put":
            model[str(number)] = stored(value)
            store.put(str(number), stored(value))
            while len(model) > most or sum(kept.size for kept in model.values()) > most_bytes:
                del model[next(iter(model))]
        elif model:
            name = list(model)[value % len(model)]
            assert store.find(name) == model[name]
            model[name] = model.pop(name)
            if step == "forget":
                store.delete(name)
                del model[name]
        assert (len(store), store.held_bytes) == (len(model), sum(kept.size for kept in model.values()))
    for name in model:
        assert store.find(name) is not None


# -- items by their ids ------------------------------------------------------------------------------


async def test_items_of_stored_responses_are_found_by_their_ids(client, engine):
    """As the AI SDK sends earlier answers."""
    engine.text = "A"
    first = await respond(client, input="1")
    [listed] = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"]
    [answer] = first["output"]
    given = [{"type": "item_reference", "id": listed["id"]}, {"id": answer["id"]}, {"role": "user", "content": "2"}]
    second = await respond(client, input=given)
    assert engine.prompt_text == "u:1\na:A\nu:2\na:"
    counted = await client.post(f"{URL}/input_tokens", json={"input": given})
    assert counted.json()["input_tokens"] == second["usage"]["input_tokens"]
    items = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["1", "A", "2"]
    await client.delete(f"{URL}/{first['id']}")
    await respond(client, input=[{"id": items[1]["id"]}, {"role": "user", "content": "3"}])
    assert engine.prompt_text == "a:A\nu:3\na:"


async def test_an_item_that_is_not_stored_is_a_404_that_says_what_to_send(client):
    first = await respond(client)
    await client.delete(f"{URL}/{first['id']}")
    for item in (first["output"][0]["id"], "msg_1"):
        asked = client.post(URL, json={"input": [{"role": "user", "content": "x"}, {"id": item}]})
        assert await refused(asked) == "input[1].id"
    assert await refused(client.post(f"{URL}/input_tokens", json={"input": [{"id": "msg_1"}]})) == "input[0].id"
