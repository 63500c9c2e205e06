"""Families whose thinking and calls mlx-lm does not read: found from template and vocabulary, read, enforced, and given
to the chat template so that it writes what the model wrote. The templates have the shape of each family's own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache

import pytest
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import mistral
from tiny import tiny_tokenizer
from tool_families import ASKED, TEXTS, TOOLS

from mlx_parallm.core.grammar import Grammar, GrammarKind, GrammarSpec, combined
from mlx_parallm.core.splitter import AnswerSyntax, split
from mlx_parallm.core.text import Tool
from mlx_parallm.errors import ConfigError
from mlx_parallm.grammar.compiler import LLCompiler
from mlx_parallm.model.tokenizer import Tokenizer, detokenizer_for
from mlx_parallm.model.tools.formats import FAMILIES, HERMES
from mlx_parallm.model.tools.thinking import REASONINGS
from mlx_parallm.server.api.conversation import Conversation, GivenCall, GivenFunction, Message

ARGUMENTS = json.dumps(ASKED[1], ensure_ascii=False)
_TOKEN = re.compile(r"<[|｜][\w▁/]+[|｜]>|\[/?[A-Z_]{3,}\]|</?think>")


@dataclass(frozen=True)
class Form:
    """`wrote`: an answer after the template's generation prompt, without the token that ends it. `not_tokens`: marks
    that consist of several tokens."""

    template: str
    wrote: str
    tool_parser: str
    reasoning_parser: str | None = None
    thought: str = ""
    not_tokens: frozenset[str] = frozenset()


def turns(assistant: str, other: str, prompt: str) -> str:
    return (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{assistant}{{% else %}}{other}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def each_call(text: str, between: str = "") -> str:
    more = f"{{% if not loop.last %}}{between}{{% endif %}}"
    return f"{{% for c in m.tool_calls or [] %}}{text}{more}{{% endfor %}}"


SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
NAME = "{{ c.function.name }}"
AS_JSON, AS_TEXT = "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"

FORMS = {
    "openai": Form(
        turns(
            "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('not both') }}{% endif %}"
            "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
            "{% if not m.tool_calls %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
            + each_call(
                "<|start|>assistant to={{ 'functions.' + c.function.name }}<|channel|>commentary json<|message|>"
                f"{AS_JSON}<|call|>"
            ),
            "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
            "<|start|>assistant",
        ),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}",
        "openai",
        "openai_gptoss",
        "Hm.",
    ),
    "deepseek_v3": Form(
        turns(
            "{% if m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>"
            + each_call(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{AS_TEXT}\n```<｜tool▁call▁end｜>"
            )
            + "<｜tool▁calls▁end｜>{% else %}<｜Assistant｜>{{ m.content }}{% endif %}",
            "<｜User｜>{{ m.content }}",
            "<｜Assistant｜>",
        ),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v3",
    ),
    "deepseek_v31": Form(
        turns(
            "<｜Assistant｜></think>{{ m.content or '' }}<｜tool▁calls▁begin｜>"
            + each_call(f"{BEGIN}{NAME}{SEP}{AS_TEXT}{END}")
            + "<｜tool▁calls▁end｜>",
            "<｜User｜>{{ m.content }}",
            "<｜Assistant｜></think>",
        ),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "deepseek_v31",
    ),
    "llama3": Form(
        turns(
            "<|start_header_id|>assistant<|end_header_id|>\n\n{{ m.content }}"
            + each_call(
                "{{ '{\"name\": \"' + c.function.name + '\", ' }}{{ '\"parameters\": ' }}" + AS_JSON + "{{ '}' }}"
            ),
            "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        "llama3_json",
    ),
    "llama4": Form(
        turns(
            "<|header_start|>assistant<|header_end|>\n\n{% if m.tool_calls %}<|python_start|>{{ m.content or '' }}"
            "<|python_end|>"
            + each_call(
                "{{ '{\"name\": \"' + c.function.name + '\", ' }}{{ '\"parameters\": ' }}" + AS_JSON + "{{ '}' }}"
            )
            + "{% else %}{{ m.content }}{% endif %}",
            "<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot|>",
            "<|header_start|>assistant<|header_end|>\n\n",
        ),
        f'<|python_start|><|python_end|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
        "llama3_json",
    ),
    "granite": Form(
        turns(
            "<|start_of_role|>assistant<|end_of_role|>{{ m.content }}",
            "{% if tools %}respond with <|tool_call|> followed by a JSON list: {{ tools | tojson }}{% endif %}"
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        "granite",
    ),
    "granite3_3": Form(
        turns(
            "<|start_of_role|>assistant<|end_of_role|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
            "</think>{% endif %}{{ m.content }}",
            "{% if tools %}respond only with <|tool_call|> followed by a JSON list of tools used{% elif thinking %}"
            "Write your thoughts between <think></think> and your response between <response></response>.{% endif %}"
            "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        f'<think>Hm.</think><|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        "granite",
        "granite3_3",
        "Hm.",
        frozenset({"<think>", "</think>"}),
    ),
    "granite_20b": Form(
        turns(
            "ASSISTANT:"
            + each_call(" <function_call> {{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"),
            "{% if tools %}<|function_call_library|>{{ tools | tojson }}{% endif %}USER: {{ m.content }}",
            "ASSISTANT:",
        ),
        f' <function_call> {{"name": "get_weather", "arguments": {ARGUMENTS}}}',
        "granite-20b-fc",
    ),
    "command_r": Form(
        turns(
            "<|CHATBOT_TOKEN|>{{ m.content }}",
            "<|USER_TOKEN|>{{ m.content }}{% if tools %}<|SYSTEM_TOKEN|>Write 'Action:' followed by a json-formatted "
            "list of actions, for example:\n```json\n[]```{% endif %}",
            "<|CHATBOT_TOKEN|>",
        ),
        'Action: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": '
        f"{ARGUMENTS}\n    }}\n]```",
        "command_r",
    ),
    "phi4_mini": Form(
        turns(
            "<|assistant|>{{ m.content }}",
            "<|{{ m.role }}|>{{ m.content }}{% if m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>",
            "<|assistant|>",
        ),
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
        "phi4_mini_json",
    ),
    "command": Form(
        turns(
            "<|CHATBOT_TOKEN|>{% if m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|><|START_ACTION|>"
            "{{ '[\n    ' }}"
            + each_call(
                f'{{{{ \'{{"tool_call_id": "\' ~ loop.index0 }}}}", "tool_name": "{NAME}", "parameters": '
                f"{AS_JSON}{{{{ '}}' }}}}",
                "{{ ',\n    ' }}",
            )
            + "{{ '\n' }}]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}",
            "<|USER_TOKEN|>{{ m.content }}",
            "<|CHATBOT_TOKEN|>",
        ),
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        f'"parameters": {ARGUMENTS}}}\n]<|END_ACTION|>',
        "cohere_command",
        "cohere_command",
        "Hm.",
    ),
    "magistral": Form(
        turns(
            "{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}"
            "{% if block['type'] == 'thinking' %}[THINK]{{ block['thinking'] }}[/THINK]{% else %}{{ block['text'] }}"
            "{% endif %}{% endfor %}{% endif %}" + each_call(f"[TOOL_CALLS]{NAME}[ARGS]{AS_JSON}"),
            "[INST]{{ m.content }}[/INST]",
            "",
        ),
        f"[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
        "mistral",
        "mistral",
        "Hm.",
    ),
}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    form, hf = FORMS[name], tiny_tokenizer()
    tokens = {*_TOKEN.findall(form.template + form.wrote)} - form.not_tokens
    hf.add_special_tokens({"additional_special_tokens": sorted(tokens)})
    hf.chat_template = form.template
    if name == "magistral":  # as mlx-lm loads it
        parser = mistral.parse_tool_call
        return Tokenizer(TokenizerWrapper(hf, tool_call_start="[TOOL_CALLS]", tool_call_end="", tool_parser=parser))
    return Tokenizer(TokenizerWrapper(hf))


@pytest.mark.parametrize("name", FORMS)
def test_a_family_is_found_from_its_template_and_its_vocabulary(name: str) -> None:
    tokenizer, form = tokenizer_of(name), FORMS[name]
    assert tokenizer.tool_format.in_template
    assert replace(tokenizer.tool_format, visible_specials=frozenset()) == FAMILIES[form.tool_parser]
    expected = REASONINGS[form.reasoning_parser] if form.reasoning_parser else None
    found = tokenizer.reasoning
    assert (found and (found.start, found.end)) == (expected and (expected.start, expected.end))


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_read_and_rendered_as_the_model_wrote_it(name: str) -> None:
    form = FORMS[name]
    check_round_trip(tokenizer_of(name), form.wrote, form.thought)


def check_round_trip(tokenizer: Tokenizer, wrote: str, thought: str) -> None:
    """Reads an answer that calls a tool, and sends it back as a message."""
    asked = Message(role="user", content="How is the weather?")
    prompt = rendered(tokenizer, [asked], add_generation_prompt=True)
    reasoning = tokenizer.reasoning
    thinks = reasoning is not None and tokenizer.decode(prompt).endswith(reasoning.start)
    syntax = AnswerSyntax(reasoning, thinks, tokenizer.tool_format, tools=TOOLS, max_calls=8)
    drawn = tokenizer.encode(wrote, add_special_tokens=False)
    detokenizer = detokenizer_for(tokenizer)((), syntax.visible_specials)
    said = split("".join(map(detokenizer.add, drawn)) + detokenizer.finish(), syntax, cut=False)
    assert (said.reasoning, said.text) == (thought, "")
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [ASKED]
    calls = [GivenCall(id="c", function=GivenFunction(name=call.name, arguments=call.arguments)) for call in said.calls]
    answer = Message(role="assistant", reasoning_content=said.reasoning or None, tool_calls=calls)
    history = rendered(tokenizer, [asked, answer], add_generation_prompt=False)
    assert history[: len(prompt) + len(drawn)] == [*prompt, *drawn], tokenizer.decode(history)


def rendered(tokenizer: Tokenizer, messages: list[Message], add_generation_prompt: bool) -> list[int]:
    tools: tuple[Tool, ...] = TOOLS
    return Conversation.of(messages, tools, tokenizer).render(tokenizer, add_generation_prompt)


def test_the_marks_around_an_answer_of_granite_are_not_in_its_text() -> None:
    syntax = AnswerSyntax(tokenizer_of("granite3_3").reasoning)
    said = split("<think>Hm.</think><response>Hello.</response>", syntax, cut=False)
    assert (said.reasoning, said.text) == ("Hm.", "Hello.")


def test_a_preamble_joins_the_thinking_where_the_template_takes_one_of_them() -> None:
    tokenizer = tokenizer_of("openai")
    call = GivenCall(id="c", function=GivenFunction(name="now", arguments="{}"))
    answer = Message(role="assistant", content="I look.", reasoning_content="Hm.", tool_calls=[call])
    text = tokenizer.decode(rendered(tokenizer, [answer], add_generation_prompt=False))
    assert "analysis<|message|>Hm.\nI look.<|end|>" in text


def test_a_template_that_is_for_tools_alone_tells_of_the_family() -> None:
    hf = tiny_tokenizer()
    hf.chat_template = {"default": "{{ messages[0].content }}", "tool_use": FORMS["command_r"].template}
    tool_format = Tokenizer(TokenizerWrapper(hf)).tool_format
    assert (tool_format.starts, tool_format.in_template) == (FAMILIES["command_r"].starts, True)


def test_phi_gets_tools_in_the_system_message() -> None:
    tokenizer = tokenizer_of("phi4_mini")
    text = tokenizer.decode(rendered(tokenizer, [Message(role="user", content="hi")], add_generation_prompt=True))
    assert text.startswith('<|system|><|tool|>[{"name": "get_weather", ')
    system = Message(role="system", content="Be kind.")
    assert "Be kind.<|tool|>" in tokenizer.decode(rendered(tokenizer, [system], add_generation_prompt=True))


def test_deepseek_v32_by_the_renderer_of_mlx_lm() -> None:
    hf = tiny_tokenizer()
    hf.add_special_tokens({"additional_special_tokens": ["｜DSML｜", "<think>", "</think>", "<｜Assistant｜>"]})
    hf.chat_template = None
    tokenizer = Tokenizer(TokenizerWrapper(hf, chat_template=deepseek_v32.apply_chat_template))
    assert tokenizer.tool_format.starts == ("<｜DSML｜function_calls>",)
    check_round_trip(tokenizer, f"Hm.</think>\n\n{TEXTS['deepseek_v32']}", "Hm.")
    prompt = rendered(tokenizer, [Message(role="user", content="hi")], add_generation_prompt=True)
    assert "get_weather" in tokenizer.decode(prompt), "the tools are described without a system message too"


def test_tokens_that_end_a_harmony_message_end_the_answer() -> None:
    tokenizer = tokenizer_of("openai")
    assert tokenizer.encode("<|call|>", add_special_tokens=False)[0] in tokenizer.eos_token_ids
    assert tokenizer.encode("<|end|>", add_special_tokens=False)[0] not in tokenizer.eos_token_ids


def test_names_overrule_what_is_found() -> None:
    wrapped = TokenizerWrapper(tiny_tokenizer())
    plain, named = Tokenizer(wrapped), Tokenizer(wrapped, tool_parser="openai", reasoning_parser="mistral")
    assert (plain.tool_format.starts, plain.reasoning) == (HERMES.starts, None)
    assert "to=functions." in named.tool_format.starts
    assert named.reasoning is not None
    assert named.reasoning.start == "[THINK]"
    assert not named.tool_format.in_template, "the template says nothing of tools"
    with pytest.raises(ConfigError, match=r"model\.tool_parser: .*nobody.*deepseek_v31.*hermes.*qwen3_coder"):
        Tokenizer(wrapped, tool_parser="nobody")
    with pytest.raises(ConfigError, match=r"model\.reasoning_parser: .*nobody.*deepseek_r1.*openai_gptoss"):
        Tokenizer(wrapped, reasoning_parser="nobody")


CALL, FINAL = "commentary to=functions.now <|constrain|>json<|message|>{}", 'final<|message|>{"a": 1}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("kinds", "good", "bad"),
    [("calls", [CALL], [FINAL]), ("format", [FINAL], [CALL]), ("calls format", [CALL, FINAL], ["final<|message|>Hm"])],
)
def test_harmony_is_enforced_after_its_thinking(kinds: str, good: list[str], bad: list[str]) -> None:
    tokenizer = tokenizer_of("openai")
    syntax = AnswerSyntax(reasoning=tokenizer.reasoning, calls=tokenizer.tool_format, tools=TOOLS)
    specs = {
        "calls": GrammarSpec(GrammarKind.CALLS, tokenizer.tool_format.grammar(TOOLS, 8, False)),
        "format": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), opening=syntax.opening),
    }
    spec = combined([specs[kind] for kind in kinds.split()]) if " " in kinds else specs[kinds]
    spec = replace(spec, visible_specials=syntax.visible_specials, reasoning_prefix=syntax.reasoning_prefix)
    compiler = LLCompiler(tokenizer, tokenizer.vocab_size)
    try:
        grammar = compiler.compile(spec)
    finally:
        compiler.close()
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    assert [answer for answer in good if not takes(grammar, tokenizer, thought + answer)] == []
    assert [answer for answer in bad if takes(grammar, tokenizer, thought + answer)] == []


def takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text may be written, and may end then."""
    state, mask = grammar.start(), bytearray(4 * -(-tokenizer.vocab_size // 32))
    for token in tokenizer.encode(text, add_special_tokens=False):
        state.fill(memoryview(mask))
        if not mask[token // 8] >> token % 8 & 1:
            return False
        state.accept(token)
    return state.ended
