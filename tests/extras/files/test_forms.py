"""The forms of rows, and what is said about a row that has none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_parallm.extras.files.forms import Example, FileKind, read_example

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
SILENT = {"role": "assistant", "content": None}
WRONG = {"role": "assistant", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def sft(**row: Any) -> Example:
    return read_example(row, FileKind.SFT)


def test_sft_takes_conversations_with_tools_and_weights() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0}
    turns = [{"role": "system", "content": "s"}, USER, call, {"role": "tool", "content": "4"}, {**ANSWER, "weight": 1}]
    found = sft(messages=turns, tools=json.dumps([TOOL["function"]]))
    assert found.tools == (TOOL,)
    assert found.untrained == {2}
    (answer,) = found.answers
    assert [turn["role"] for turn in answer] == ["system", "user", "assistant", "tool", "assistant"]
    assert answer[2]["tool_calls"] == [CALL]
    assert sft(messages=[USER, {**SILENT, "weight": 0}, USER, ANSWER]).untrained == {1}
    assert sft(messages=json.dumps([USER, ANSWER])).answers == ((USER, ANSWER),)


def test_sft_takes_prompts_alpaca_share_gpt_and_text() -> None:
    assert sft(prompt="a", completion="b") == Example("a", ("b",))
    assert sft(prompt=[USER], completion=[ANSWER]) == Example((USER,), ((ANSWER,),))
    assert sft(prompt=[USER], completion="4") == Example((USER,), ((ANSWER,),))
    assert sft(instruction="Add.", input="2+2", output="4") == Example("Add.\n\n2+2", ("4",))
    assert sft(instruction="Add.", input="", output="4") == Example("Add.", ("4",))
    with_system = sft(instruction="Add.", output="4", system="Be brief.")
    assert [turn["role"] for turn in with_system.prompt] == ["system", "user"]
    share_gpt = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    assert sft(conversations=share_gpt) == sft(messages=[USER, ANSWER])
    assert sft(text="a b c") == Example("", ("a b c",))


def test_dpo_takes_the_forms_of_trl_and_openai() -> None:
    wanted = Example((USER,), ((ANSWER,), (WRONG,)))
    for row in (
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
        {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        {"prompt": "2+2?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        {"question": "2+2?", "chosen": [ANSWER], "rejected": [WRONG]},
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [WRONG]},
    ):
        assert read_example(row, FileKind.DPO) == wanted
    texts = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    assert read_example(texts, FileKind.DPO) == Example("2+2?", ("4", "5"))


@pytest.mark.parametrize(("label", "value"), [(True, 1), (1, 1), ("true", 1), (False, -1), (0.0, -1), ("False", -1)])
def test_kto_takes_labels_as_files_write_them(label: object, value: float) -> None:
    row = {"prompt": "a", "completion": "b", "label": label}
    assert read_example(row, FileKind.KTO) == Example("a", ("b",), label=value)


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("sft", {"mesages": []}, "it has 'mesages': did you mean 'messages'"),
        ("sft", {"Prompt": "a", "Completion": "b"}, "it has 'Prompt': did you mean 'prompt'"),
        ("sft", {"a": 1}, r"it has a; a row needs messages or conversations or prompt\+completion or"),
        ("sft", {"prompt": "a", "completion": None}, "completion is empty"),
        ("sft", {"text": ""}, "text must be text that is not empty"),
        ("sft", {"messages": [USER]}, "no message of the assistant answers"),
        ("sft", {"messages": [ANSWER]}, "no message of the assistant answers"),
        ("sft", {"messages": [USER, {**ANSWER, "weight": 0}]}, "nothing to train"),
        ("sft", {"messages": [USER, {**ANSWER, "weight": 2}]}, "weight must be 0 or 1"),
        ("sft", {"messages": [USER, ANSWER, USER, SILENT]}, "message 4 is empty, and would be learnt"),
        ("sft", {"prompt": [USER], "completion": [SILENT]}, "an answer is empty"),
        ("dpo", {"prompt": "a", "chosen": [ANSWER], "rejected": [SILENT]}, "an answer is empty"),
        ("sft", {"messages": [{"role": "robot", "content": "a"}]}, "each message needs a role"),
        ("sft", {"messages": [USER, ANSWER], "tools": [{"a": 1}]}, "each of tools must be"),
        ("sft", {"prompt": "a", "completion": "b", "": ["c"]}, "more fields than the header"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": [WRONG]}, "must both be texts"),
        ("dpo", {"chosen": "b", "rejected": "c"}, "there is no prompt"),
        ("dpo", {"prompt": "a", "choosen": "b", "rejected": "c"}, "did you mean 'chosen'"),
        ("kto", {"prompt": "a", "completion": "b", "label": "yes"}, "label must be true or false, got 'yes'"),
    ],
)
def test_a_row_without_a_form_says_what_to_change(kind: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_example(row, FileKind(kind))


def test_examples_with_one_question_have_the_same() -> None:
    conversation = sft(messages=[USER, ANSWER]).question
    assert conversation == sft(messages=[USER, WRONG]).question
    assert sft(prompt="a", completion="b").question == sft(prompt="a", completion="c").question
    assert sft(text="a").question != sft(text="b").question
