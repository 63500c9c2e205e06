"""Stored responses: how they are continued, retrieved and deleted, and how many are kept."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.test_disconnect import eventually, post

from mlx_parallm.server.api.responses.store import ResponseStore, StoredResponse

URL = "/v1/responses"


async def respond(client, **body):
    response = await client.post(URL, json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_text(engine):
    return bytes(engine.requests[-1].prompts[0]).decode()


async def refused(fault, asked):
    response = await asked
    error = fault(response)
    assert (response.status_code, error["code"]) == (404, "response_not_found")
    return error["param"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued(client, engine, stream):
    engine.text = "A"
    first = await respond(client, input="1", instructions="be kind")
    response = await client.post(URL, json={"input": "2", "previous_response_id": first["id"], "stream": stream})
    assert prompt_text(engine) == "u:1\na:A\nu:2\na:"
    second = response.headers["x-request-id"]
    got = await respond(client, input="3", previous_response_id=second, instructions="be brief")
    assert got["previous_response_id"] == second
    assert prompt_text(engine) == "s:be brief\nu:1\na:A\nu:2\na:A\nu:3\na:"


async def test_a_response_is_continued_twice(client, engine):
    engine.text = "A"
    first = await respond(client, input="1")
    for turn in ("2", "3"):
        await respond(client, input=turn, previous_response_id=first["id"])
        assert prompt_text(engine) == f"u:1\na:A\nu:{turn}\na:"


async def test_deleting_an_earlier_turn_leaves_later_ones_whole(client, engine, fault):
    engine.text = "A"
    first = await respond(client, input="1")
    second = await respond(client, input="2", previous_response_id=first["id"])
    deleted = await client.delete(f"{URL}/{first['id']}")
    assert (deleted.status_code, deleted.json()) == (200, {"id": first["id"], "object": "response", "deleted": True})
    await respond(client, input="3", previous_response_id=second["id"])
    assert prompt_text(engine) == "u:1\na:A\nu:2\na:A\nu:3\na:"
    again = client.post(URL, json={"input": "x", "previous_response_id": first["id"]})
    assert await refused(fault, again) == "previous_response_id"
    assert await refused(fault, client.delete(f"{URL}/{first['id']}")) == "response_id"


async def test_a_stored_response_is_retrieved(client, fault):
    for fields in ({}, {"max_output_tokens": 1}):
        got = await respond(client, **fields)
        assert (await client.get(f"{URL}/{got['id']}")).json() == got
    assert await refused(fault, client.get(f"{URL}/resp_other")) == "response_id"


async def test_store_false_stores_nothing(client, fault):
    got = await respond(client, store=False)
    assert got["store"] is False
    assert await refused(fault, client.get(f"{URL}/{got['id']}")) == "response_id"
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


async def test_an_unknown_query_parameter_is_refused(client, fault):
    got = await respond(client)
    response = await client.get(f"{URL}/{got['id']}?after=true")
    assert (response.status_code, fault(response)["param"]) == (400, "after")


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3"])
async def test_the_events_of_a_stored_response_are_refused_with_the_reason(client, fault, query):
    got = await respond(client)
    response = await client.get(f"{URL}/{got['id']}?{query}")
    assert (response.status_code, fault(response)["param"]) == (400, query.partition("=")[0])
    assert "leave it out to get the whole response" in fault(response)["message"]
    assert (await client.get(f"{URL}/{got['id']}?stream=false")).json() == got


async def test_what_openai_has_beside_the_ids_of_responses_is_absent(client, fault):
    response = await client.post(f"{URL}/compact", json={"input": "hi"})
    assert (response.status_code, fault(response)["code"]) == (404, "not_found")
    assert (await client.post(f"{URL}/resp_x", json={})).status_code == 405


async def test_the_least_recently_used_is_dropped(client, fault, monkeypatch):
    monkeypatch.setattr(client.app.state.services.responses, "_most", 2)
    first, second = await respond(client), await respond(client)
    await client.get(f"{URL}/{first['id']}")
    third = await respond(client)
    assert await refused(fault, client.get(f"{URL}/{second['id']}")) == "response_id"
    for kept in (first, third):
        assert (await client.get(f"{URL}/{kept['id']}")).status_code == 200


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


def test_a_response_that_is_too_large_drops_no_other():
    store = ResponseStore(9, 10)
    store.put("a", stored(10))
    store.put("b", stored(11))
    assert store.find("a") == stored(10)
    assert store.find("b") is None


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
    assert prompt_text(engine) == "u:1\na:A\nu:2\na:"
    counted = await client.post(f"{URL}/input_tokens", json={"input": given})
    assert counted.json()["input_tokens"] == second["usage"]["input_tokens"]
    items = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["1", "A", "2"]
    await client.delete(f"{URL}/{first['id']}")
    await respond(client, input=[{"id": items[1]["id"]}, {"role": "user", "content": "3"}])
    assert prompt_text(engine) == "a:A\nu:3\na:"


async def test_an_item_that_is_not_stored_is_a_404_that_says_what_to_send(client, fault):
    first = await respond(client)
    await client.delete(f"{URL}/{first['id']}")
    for item in (first["output"][0]["id"], "msg_1"):
        asked = client.post(URL, json={"input": [{"role": "user", "content": "x"}, {"id": item}]})
        assert await refused(fault, asked) == "input[1].id"
    assert await refused(fault, client.post(f"{URL}/input_tokens", json={"input": [{"id": "msg_1"}]})) == "input[0].id"
