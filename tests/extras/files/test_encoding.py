"""Which tokens of an example are trained, with chat templates of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from chat_templates import KINDS, wrapped
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import CHAT_TEMPLATE, tiny_tokenizer

from mlx_parallm.extras.files.encoding import Encoded, Encoder, check_usable
from mlx_parallm.extras.files.forms import FileKind, read_example
from mlx_parallm.model.tokenizer import Tokenizer

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > last.at %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves out the reasoning of earlier answers, as Qwen3's does."""
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "second"},
]


def tokenizer(template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    plain = tiny_tokenizer()
    plain.chat_template = template
    return Tokenizer(TokenizerWrapper(plain))


def encoded(tok: Tokenizer, row: dict[str, Any], kind: str = "sft", longest: int = 999, cuts: bool = False) -> Any:
    return Encoder(tok, longest, cuts).encode(read_example(row, FileKind(kind)))


def trained(tok: Tokenizer, turns: Sequence[Encoded]) -> list[str]:
    """The trained text of each turn, its stretches joined by |."""
    return [
        "".join(
            tok.decode([token]) if kept else "|"
            for token, kept in zip(each.completion_ids, each.mask or [True] * len(each.completion_ids), strict=True)
        )
        for each in turns
    ]


def test_each_answer_is_trained_with_its_end_after_the_prompt_that_asks_for_it() -> None:
    tok = tokenizer()
    (turns,) = encoded(tok, {"messages": CONVERSATION})
    assert trained(tok, turns) == ["first<|im_end|>", "second<|im_end|>"]
    for number, turn in zip((2, 4), turns, strict=True):
        assert list(turn.prompt_ids) == tok.apply_chat_template(CONVERSATION[:number])
    assert "Be brief." in tok.decode(turns[0].prompt_ids)


def test_openai_weights_leave_answers_out() -> None:
    tok = tokenizer()
    weighted = [{**turn, "weight": 0} if turn["content"] == "first" else turn for turn in CONVERSATION]
    for template in (CHAT_TEMPLATE, MARKED):
        (turns,) = encoded(tokenizer(template), {"messages": weighted})
        assert trained(tok, turns) == ["second<|im_end|>"]
        assert "first" in tok.decode(turns[0].prompt_ids)


def test_reasoning_is_trained_where_the_template_writes_it_and_left_out_of_later_prompts() -> None:
    tok = tokenizer(FORGETFUL)
    reasoned = [{**turn, "reasoning_content": f"so {turn['content']}"} for turn in CONVERSATION]
    (turns,) = encoded(tok, {"messages": reasoned})
    assert trained(tok, turns) == [f"<think>so {name}</think>{name}<|im_end|>" for name in ("first", "second")]
    assert "<think>" not in tok.decode(turns[1].prompt_ids)
    assert "first" in tok.decode(turns[1].prompt_ids)


def test_tools_are_described_and_their_calls_trained() -> None:
    """As text, because this template knows no tools; results are context."""
    tok = tokenizer()
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "it is 4"},
        {"role": "assistant", "content": "4"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    ((first, second),) = encoded(tok, {"messages": turns, "tools": [tool]})
    assert '"name": "add", "parameters"' in tok.decode(first.prompt_ids)
    assert '"name": "add", "arguments": {"a": 2}' in trained(tok, [first])[0]
    assert trained(tok, [second]) == ["4<|im_end|>"]
    assert "it is 4" in tok.decode(second.prompt_ids)


def test_marks_of_the_template_say_what_is_trained() -> None:
    """They are found where the text before them is what the model sees when it is asked, too."""
    tok = tokenizer(MARKED)
    (turns,) = encoded(tok, {"messages": CONVERSATION})
    (turn,) = turns
    kept = trained(tok, turns)[0]
    assert [part for part in kept.split("|") if part] == ["first<", "im_end", ">", "second<", "im_end", ">"]
    ids = [*turn.prompt_ids, *turn.completion_ids]
    assert ids == tok.apply_chat_template(CONVERSATION, add_generation_prompt=False)[: len(ids)]


def test_marks_are_not_used_where_a_message_has_the_text_of_a_control_token() -> None:
    tok = tokenizer(MARKED)
    forged = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]
    (turns,) = encoded(tok, {"messages": forged})
    assert trained(tok, turns) == ["b<|im_end|>"]
    assert turns[0].prompt_ids == tuple(tok.apply_chat_template(forged[:1]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "changing"])
def test_with_any_template_the_answer_is_trained_and_the_question_is_not(kind: str) -> None:
    tok = Tokenizer(wrapped(kind))
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "end."}]
    ((turn,),) = encoded(tok, {"messages": turns})
    assert tok.decode(turn.completion_ids, skip_special_tokens=True).strip() == "end."
    assert "hello" in tok.decode(turn.prompt_ids)


def test_texts_are_a_conversation_with_a_template_and_plain_text_without() -> None:
    row, chats, plain = {"prompt": "ab", "completion": "cd"}, tokenizer(), tokenizer(None)
    ((turn,),) = encoded(chats, row)
    assert list(turn.prompt_ids) == chats.apply_chat_template([{"role": "user", "content": "ab"}])
    ((turn,),) = encoded(plain, row)
    assert (plain.decode(turn.prompt_ids), plain.decode(turn.completion_ids)) == ("ab", "cd<|im_end|>")
    for tok in (chats, plain):
        ((turn,),) = encoded(tok, {"text": "abc"})
        assert (tok.decode(turn.prompt_ids), tok.decode(turn.completion_ids)) == ("a", "bc<|im_end|>")
        ((turn,),) = encoded(tok, {"text": "abc<|im_end|>"})
        assert tok.decode(turn.completion_ids) == "bc<|im_end|>"


def test_a_text_of_one_token_trains_its_end() -> None:
    tok = tokenizer()
    ((turn,),) = encoded(tok, {"text": "a"})
    assert (tok.decode(turn.prompt_ids), tok.decode(turn.completion_ids)) == ("a", "<|im_end|>")


def test_pairs_have_one_prompt_and_two_answers() -> None:
    tok = tokenizer()
    chosen, rejected = encoded(tok, {"prompt": "ab", "chosen": "yes", "rejected": "no"}, "dpo")
    assert chosen[0].prompt_ids == rejected[0].prompt_ids
    assert (trained(tok, chosen), trained(tok, rejected)) == (["yes<|im_end|>"], ["no<|im_end|>"])


def test_long_rows_are_left_out_or_cut() -> None:
    tok = tokenizer()
    with pytest.raises(ValueError, match=r"it has 100 tokens of at most 10; raise --max-length"):
        encoded(tok, {"text": "a" * 99}, longest=10)
    ((turn,),) = encoded(tok, {"text": "a" * 99}, longest=10, cuts=True)
    assert tok.decode(turn.prompt_ids + turn.completion_ids) == "a" * 10
    with pytest.raises(ValueError, match="no token to train within 10 tokens"):
        encoded(tok, {"prompt": "a" * 99, "completion": "b"}, longest=10, cuts=True)


def test_conversations_need_a_template() -> None:
    example = read_example({"messages": CONVERSATION}, FileKind.SFT)
    assert check_usable(FileKind.SFT, Encoder(tokenizer(), 99, False), example) == ""
    assert "has no chat template" in check_usable(FileKind.SFT, Encoder(tokenizer(None), 99, False), example)
