"""`input_items`, `input_tokens` and `cancel` of `/v1/responses`."""

import json
from dataclasses import replace

import openai
import pytest
from server.asking import answered, refusal
from server.fakes import CARD

URL = "/v1/responses"
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}


async def create(client, **fields):
    return await answered(client, URL, {"max_output_tokens": 5, **fields})


@pytest.fixture
def sdk(serving):
    return lambda server: openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


async def test_the_items_of_all_turns_are_listed(client):
    first = await create(client, input="a", instructions="I")
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    second = await create(client, input=[thought, CALL, RESULT], previous_response_id=first["id"])
    await client.delete(f"{URL}/{first['id']}")
    listed = (await client.get(f"{URL}/{second['id']}/input_items?order=asc")).json()
    kinds = [item["type"] for item in listed["data"]]
    assert kinds == ["message", "message", "reasoning", "function_call", "function_call_output"]
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert listed["data"][1] == first["output"][0]
    assert listed["data"][4] == {**RESULT, "id": listed["data"][4]["id"], "status": "completed"}
    assert len({item["id"] for item in listed["data"]}) == 5
    assert (listed["object"], listed["has_more"]) == ("list", False)


async def test_pages_with_the_openai_client(serving, sdk):
    async with serving() as server, sdk(server) as client:
        turns = [{"role": "user", "content": str(k)} for k in range(7)]
        response = await client.responses.create(input=turns, model="base", max_output_tokens=5)
        items = client.responses.input_items
        ask = {"response_id": response.id, "limit": 3, "include": ["message.output_text.logprobs"]}
        newest = [item.content[0].text async for item in items.list(**ask)]
        oldest = [item.content[0].text async for item in items.list(**ask, order="asc")]
        assert newest == oldest[::-1] == list("6543210")
        page = await items.list(**ask)
        assert (len(page.data), page.has_more) == (3, True)
        counted = await client.responses.input_tokens.count(input=turns, model="base")
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
        with pytest.raises(openai.NotFoundError):  # no response runs in the background
            await client.responses.cancel(response.id)


@pytest.mark.parametrize(("method", "path"), [("GET", "input_items"), ("GET", ""), ("DELETE", "")], ids=str)
async def test_a_response_that_is_not_stored_is_a_404(client, method, path):
    await refusal(client.request(method, f"{URL}/resp_x/{path}"), 404, code="response_not_found")


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=nope", "x=1"])
async def test_an_invalid_query_is_refused(client, query):
    stored = await create(client, input="a")
    await refusal(client.get(f"{URL}/{stored['id']}/input_items?{query}"), 400, param=query.partition("=")[0])


async def test_the_whole_prompt_is_counted(client, engine):
    first = await create(client, input="a")
    fields = {"input": "b", "instructions": "I", "previous_response_id": first["id"], "num_ctx": 1}
    counted = await client.post(f"{URL}/input_tokens", json=fields)
    assert len(engine.requests) == 1
    assert counted.headers["x-ignored-fields"] == "num_ctx"
    assert counted.json()["input_tokens"] == (await create(client, **fields))["usage"]["input_tokens"]


# -- items of other servers --------------------------------------------------------------------------

FOUND = [{"file_id": "file-1", "filename": "a.md", "text": "Tea is hot."}]
ELSEWHERE = [
    (
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "tea"}},
        'a:[web_search_call] {"action": {"type": "search", "query": "tea"}}\n',
    ),
    ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, ""),
    (
        {"type": "file_search_call", "id": "fs_1", "queries": ["tea"], "results": FOUND},
        f'a:[file_search_call] {{"queries": ["tea"], "results": {json.dumps(FOUND)}}}\n',
    ),
    ({"type": "local_shell_call_output", "id": "l", "output": "é"}, 'u:[local_shell_call_output] {"output": "é"}\n'),
    ({"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0", "revised_prompt": None}, ""),
    ({"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}, ""),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "a:No.\n"),
]


@pytest.mark.parametrize(("item", "written"), ELSEWHERE, ids=lambda value: str(value)[:40])
async def test_items_of_other_servers_are_kept_as_text(make_client, engine, item, written):
    client = make_client(card=replace(CARD, context_length=1000))
    made = await create(client, input=[{"role": "user", "content": "q"}, item, {"role": "user", "content": "r"}])
    assert engine.prompt_text == f"u:q\n{written}u:r\na:"
    listed = (await client.get(f"{URL}/{made['id']}/input_items?order=asc")).json()["data"][1]
    assert listed.items() >= {"type": item.get("type", "message"), "status": "completed"}.items()
    await create(client, input="s", previous_response_id=made["id"])
    assert engine.prompt_text.startswith(f"u:q\n{written}u:r\n")
