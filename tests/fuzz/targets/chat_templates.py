"""Conversations in the templates of several models, or in a hostile one, in Jinja's sandbox: token ids, or the one
error. The text of a message makes no control token.

`{"template": a name, or text, "messages": [...], "variables": {...}}`; the messages are as the server checks them.
"""

import json
from contextlib import suppress
from functools import cache

from chat_templates import KINDS, wrapped
from fuzz.mutation import json_with

from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.model.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
PIECES = (
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m.__class__.__mro__ }}", "{{ ''.__class__ }}",
    "{% set x = namespace(a=1) %}", "{{ messages | tojson }}", "{{ raise_exception('no') }}", "{% if x %}",
    "{% endif %}", "{{ range(10) | list }}",
    "{{ cycler.__init__.__globals__ }}", "{{ x | attr('__class__') }}", "{% macro f() %}",
    "{{ strftime_now('%Y') }}", "{{ ''.format_map }}", "{{ '{0.__class__}'.format(x) }}", "{% include 'a' %}",
)  # fmt: skip
LONGEST = 500
"""Characters of a template. Jinja compiles an expression in time that grows with the square of its length, or faster:
300 names with dots between them take 2 s. Clients send no templates."""
mutated = json_with(
    ["template", "messages", "variables", "role", "content", "tool_calls", "function", "name", "arguments", "tools"],
    [*KINDS, *ROLES, *PIECES, "<|im_start|>", "<think>", "</think>", {"role": "user", "content": "x"}],
)


@cache
def tokenizer_of(kind):
    return Tokenizer(wrapped(kind))


def checked(given):
    """What the schemas of the server let through. Raises KeyError, TypeError, AssertionError: anything else."""
    messages = []
    for each in given["messages"]:
        assert each["role"] in ROLES
        assert isinstance(each["content"], str)
        calls = each.get("tool_calls", [])
        functions = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
        assert all(isinstance(function["name"], str) for function in functions)
        more = {"tool_calls": [{"type": "function", "function": one} for one in functions]} if functions else {}
        messages.append({"role": each["role"], "content": each["content"], **more})
    assert messages
    json.dumps(given, ensure_ascii=False).encode()
    return messages


def run(data):
    try:
        given = json.loads(data)
        messages, template = checked(given), given["template"]
        variables = {name: value for name, value in given.get("variables", {}).items() if name in ("tools", "x")}
        assert isinstance(template, str)
        assert len(template) <= LONGEST
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
        return
    tokenizer = tokenizer_of(template if template in KINDS else "chatml")
    text = None if template in KINDS else template
    with suppress(InvalidRequestError, ContextLengthError):
        ids = tokenizer.apply_chat_template(messages, at_most=20_000, template=text, **variables)
        tokenizer.decode(ids).encode()
