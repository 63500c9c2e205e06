"""A bound on the reasoning, in the fields of each API: what reaches the engine, and what is refused."""

from dataclasses import replace

import pytest
from server.asking import answered, refused
from server.fakes import CARD, EOS, ByteTokenizer
from tool_families import TOOLS
from walks import allowed, follows

from mlx_parallm.errors import InvalidRequestError

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
START, END = "{think}", "{/think}"
BUDGET_OF_3 = {
    CHAT: {"messages": USER, "thinking_token_budget": 3},
    RESPONSES: {"input": "hi", "thinking_token_budget": 3},
    MESSAGES: {"messages": USER, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 3}},
}


@pytest.fixture
def plain_client(make_client):
    """Of a server whose model does not mark its reasoning."""
    return make_client(replace(CARD, context_length=10_000))


@pytest.fixture
def client(thinking_client):
    return thinking_client


def may_think(grammar, thoughts):
    """Whether an answer may begin with these thoughts."""
    state = grammar.start()
    for token in f"{START}{thoughts}".encode():
        if token not in allowed(state):
            return False
        state.accept(token)
    return True


async def grammar_of(client, engine, path, **fields):
    await answered(client, path, {**BUDGET_OF_3.get(path, {}), **fields})
    return engine.requests[-1].grammar


@pytest.mark.parametrize("path", BUDGET_OF_3)
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_has_at_most_so_many_tokens(client, engine, path, stream):
    response = await client.post(path, json={**BUDGET_OF_3[path], "stream": stream})
    assert response.status_code == 200, response.text
    grammar = engine.requests[-1].grammar
    assert may_think(grammar, "abc")
    assert may_think(grammar, f"abc{END}and the answer")
    assert may_think(grammar, f"a{END}{START} in the answer")
    assert not may_think(grammar, "abcd")


async def test_a_prompt_that_has_begun_to_think(client, engine):
    messages = [{"role": "assistant", "content": START}]
    grammar = await grammar_of(client, engine, CHAT, messages=messages, add_generation_prompt=False)
    state = grammar.start()
    for token in b"abc":
        assert len(allowed(state)) > 100
        state.accept(token)
    assert allowed(state) == {END.encode()[0]}


async def test_the_other_name_and_no_bound(client, engine):
    body = {"messages": USER}
    await answered(client, CHAT, {**body, "max_thinking_tokens": 3})
    assert not may_think(engine.requests[-1].grammar, "abcd")
    for unbounded in ({}, {"thinking_token_budget": -1}, {"max_thinking_tokens": None}):
        await answered(client, CHAT, {**body, **unbounded})
        assert engine.requests[-1].grammar is None


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, NOW),
        ({"guided_choice": ["yes"]}, "yes"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, NOW),
    ],
    ids=["calls", "a format", "either"],
)
async def test_what_is_enforced_comes_after_the_bounded_reasoning(client, engine, fields, answer):
    grammar = await grammar_of(client, engine, CHAT, **fields)
    assert follows(grammar, answer)
    assert follows(grammar, f"{START}abc{END}{answer}")
    assert not follows(grammar, f"{START}abc{END}Words.")
    assert not may_think(grammar, "abcd")


async def test_a_model_without_marks(plain_client, engine):
    """Clients of Messages send a budget with every request."""
    for field in ("thinking_token_budget", "max_thinking_tokens"):
        assert (await refused(plain_client, CHAT, messages=USER, **{field: 3}))["param"] == field
    assert (await refused(plain_client, RESPONSES, **BUDGET_OF_3[RESPONSES]))["param"] == ("thinking_token_budget")
    await answered(plain_client, MESSAGES, BUDGET_OF_3[MESSAGES])
    assert engine.requests[-1].grammar is None


async def test_trajectories_are_drawn_without_a_budget(client, engine):
    error = await refused(client, CHAT, **BUDGET_OF_3[CHAT], collect_trajectory=True)
    assert error["param"] == "thinking_token_budget"
    assert await grammar_of(client, engine, MESSAGES, collect_trajectory=True) is None


# ---- how much a model reasons ------------------------------------------------------------------------------

EFFORTS = {
    CHAT: {"messages": USER, "reasoning_effort": "high"},
    RESPONSES: {"input": "hi", "reasoning": {"effort": "high"}},
    MESSAGES: {"messages": USER, "max_tokens": 9, "output_config": {"effort": "high"}},
}


class EffortTokenizer(ByteTokenizer):
    """Its template has a variable for the effort, and knows two values of it."""

    chat_template = "{{ reasoning_effort }}"

    def apply_chat_template(self, messages, *rest, **variables):
        if variables.get("reasoning_effort", "none") not in ("none", "high"):
            raise InvalidRequestError("the template refuses this effort", param="messages")
        return super().apply_chat_template(messages, *rest, **variables)


@pytest.fixture
def effort_client(make_client):
    return make_client(replace(CARD, context_length=10_000), EffortTokenizer())


async def prompt_of(client, engine, path, body):
    await answered(client, path, body)
    return engine.prompt_text


@pytest.mark.parametrize("path", EFFORTS)
async def test_the_effort_is_a_variable_of_a_template_that_has_it(effort_client, plain_client, engine, path):
    assert "reasoning_effort=high" in await prompt_of(effort_client, engine, path, EFFORTS[path])
    assert "reasoning_effort" not in await prompt_of(plain_client, engine, path, EFFORTS[path])


async def test_an_effort_that_the_template_does_not_know_is_left_out(effort_client, engine):
    """Agents send one with every request. A variable that a client sets itself is not left out."""
    body = {"messages": USER, "reasoning_effort": "xhigh"}
    assert "reasoning_effort" not in await prompt_of(effort_client, engine, CHAT, body)
    own = {"chat_template_kwargs": {"reasoning_effort": "none"}}
    assert "reasoning_effort=none" in await prompt_of(effort_client, engine, CHAT, {**body, **own})
    unknown = {"chat_template_kwargs": {"reasoning_effort": "some"}}
    assert (await refused(effort_client, CHAT, messages=USER, **unknown))["param"] == "messages"


async def test_tokens_that_a_request_allows_may_lack_the_mark(client):
    error = await refused(client, CHAT, **BUDGET_OF_3[CHAT], allowed_token_ids=[65, EOS])
    assert error["param"] == "allowed_token_ids"
