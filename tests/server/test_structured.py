"""Structured output: every field that asks for it becomes the grammar of the engine's request."""

import json

import pytest
from server.asking import answered, refusal
from walks import follows

URLS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


async def grammar_of(client, engine, fields, url="/v1/completions"):
    await answered(client, url, {**URLS[url], **fields})
    return engine.requests[-1].grammar


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1, null]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
         '{"a": 5}', '{"b": 5}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, "[1, {}]", "x"),
        ({"guided_json": SCHEMA}, '{"a": 5}', '{"a": "5"}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"a": 5}', "{}"),
        ({"guided_regex": "[0-9]{2}"}, "42", "4"),
        ({"guided_choice": ["red", "green"]}, "green", "blue"),
        ({"guided_grammar": 'root ::= "a"+'}, "aaa", "ab"),
        ({"guided_grammar": 'root ::= "a"+', "structured_outputs": {"grammar": 'root ::= "a"+'}}, "aaa", "ab"),
        ({"regex": "[0-9]{2}"}, "42", "4"),
        ({"ebnf": 'root ::= "a"+'}, "aaa", "ab"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 5}', "{}"),
        ({"structured_outputs": {"regex": "[0-9]{2}"}}, "42", "x"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red", "re"),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, "a", ""),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)  # fmt: skip
async def test_every_field_that_asks_for_it(client, engine, url, fields, good, bad):
    grammar = await grammar_of(client, engine, fields, url)
    assert follows(grammar, good)
    assert not follows(grammar, bad)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
async def test_free_text_has_no_grammar(client, engine, fields):
    assert await grammar_of(client, engine, fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
         "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": []}}},
         "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"regex": "("}, "regex"),
        ({"regex": "a", "guided_regex": "b"}, "regex"),
        ({"ebnf": "start: nobody"}, "ebnf"),
        ({"lora_path": "a"}, "lora_path"),
        ({"guided_regex": "a{1000}{1000}{1000}"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " ", "regex": "a"}}, "structured_outputs.whitespace_pattern"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "collect_trajectory": True}, "guided_regex"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)  # fmt: skip
async def test_invalid_fields_are_refused_by_name(client, engine, fields, param):
    await refusal(client.post("/v1/completions", json={"prompt": "x", **fields}), 400, param=param)
    assert engine.requests == []


async def test_a_schema_too_deep_or_too_long_is_refused(client):
    deep = {}
    for _ in range(100):
        deep = {"not": deep}
    long = {"enum": ["x" * 1000] * 200}
    for schema in (deep, long, json.dumps(deep)):
        await refusal(
            client.post("/v1/completions", json={"prompt": "x", "guided_json": schema}), 400, param="guided_json"
        )
