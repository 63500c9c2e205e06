"""Files of preferences: the forms of their rows, and what is left out or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rl.rollout_rig import END, Tokenizer

from mlx_parallm.errors import ConfigError, ContextLengthError
from mlx_parallm.extras.reward_models.preference_files import read_preferences
from mlx_parallm.extras.reward_models.preferences import Agreement, Preference, split

USER = {"role": "user", "content": "Hello?"}
HI, NO = ({"role": "assistant", "content": text} for text in ("Hi", "No"))
ANSWERS = {"chosen": "Hi", "rejected": "No"}
CALLS = [{"function": {"name": "f"}}]


class Tokens(Tokenizer):
    """Its control token is the character #."""

    eos_token_ids, eos_token = frozenset({END}), "|"
    special_ids = frozenset({END, ord("#")})
    reasoning = None

    def encode(self, text: str, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        if at_most is not None and len(text) > at_most:
            raise ContextLengthError("it is too long")
        return [*map(ord, text)]

    def token_string(self, token: int) -> str:
        return "|" if token == END else chr(token)


def read(path: Path, *rows: object, context: int = 1000) -> list[Preference]:
    path = path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_preferences(str(path), Tokens(), context, "--preferences")


def text(ids: tuple[int, ...]) -> str:
    return "".join(chr(token) if token != END else "|" for token in ids)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hello?", **ANSWERS},
        {"question": "Hello?", **ANSWERS},
        {"messages": [USER], **ANSWERS},
        {"prompt": [USER], **ANSWERS},
        {"prompt_messages": [USER], **ANSWERS, "score_chosen": 9.0},
        {"prompt": [USER], "chosen": [HI], "rejected": [NO]},
        {"prompt": "Hello?", "chosen": [USER, HI], "rejected": [USER, NO]},
        {"chosen": [USER, HI], "rejected": [USER, NO]},
        {"prompt": json.dumps([USER]), "chosen": json.dumps([HI]), "rejected": json.dumps([NO])},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello?"}]}], **ANSWERS},
    ],
)
def test_the_forms_of_a_row(tmp_path: Path, row: dict[str, Any]) -> None:
    (found,) = read(tmp_path, row)
    assert [text(found.chosen), text(found.rejected)] == [
        "<user>Hello?|\n<assistant>Hi|",
        "<user>Hello?|\n<assistant>No|",
    ]


def test_conversations_of_several_turns(tmp_path: Path) -> None:
    turns = [USER, HI, {"role": "user", "content": "Bye?"}]
    (found,) = read(tmp_path, {"chosen": [*turns, HI], "rejected": [*turns, NO]})
    assert text(found.prompt_ids) == "<user>Hello?|\n<assistant>Hi|\n<user>Bye?|\n<assistant>"


def test_an_answer_may_be_json_of_objects(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"prompt": "Hello?", "chosen": '[{"a": 1}]', "rejected": "No"})
    assert text(found.chosen).endswith('<assistant>[{"a": 1}]|')


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("{", "line 2"),
        ([1], "not a JSON object"),
        (ANSWERS, "there is no prompt"),
        ({"prompt": "Hello?", "chosen": "Hi"}, "there is no rejected answer"),
        ({"prompt": "Hello?", "chosen": "Hi", "rejected": [NO]}, "be of one kind"),
        ({"prompt": "", **ANSWERS}, "a text that is not empty"),
        ({"prompt": "Hello?", "chosen": "Hi", "rejected": "Hi"}, "are the same"),
        ({"prompt": "Hello?", "chosen": "", "rejected": "Hi"}, "text that is not empty"),
        ({"prompt": "Hello?", "chosen": "a#b", "rejected": "Hi"}, "control token '#'"),
        ({"prompt": [USER, HI], **ANSWERS}, "the answers follow the user's"),
        ({"prompt": "Hello?", "chosen": [USER], "rejected": [NO]}, "must be the assistant's answer"),
        ({"chosen": [USER, HI], "rejected": [NO]}, "differ in their last message only"),
        ({"prompt": [{"role": "user"}], **ANSWERS}, "a message of the role user needs content"),
        ({"chosen": [USER, {**HI, "tool_calls": CALLS}], "rejected": [USER, NO]}, "a text without calls"),
        ({"prompt": "x" * 30, **ANSWERS}, "the model's context is 40"),
        ({"prompt": "Hello?", "chosen": "x" * 50, "rejected": "No"}, "too long"),
        ({"prompt": "Hello?", "chosen": "x" * 36, "rejected": "No"}, "the model's context is 40"),
    ],
)
def test_rows_that_cannot_be_used_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: object, why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(read(tmp_path, {"prompt": "a", **ANSWERS}, row, context=40)) == 1
    (record,) = caplog.records
    assert "line 2" in record.getMessage()
    assert why in record.getMessage()


def test_a_file_without_preferences_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--preferences: .* has no preference; .*there is no prompt"):
        read(tmp_path, ANSWERS)
    with pytest.raises(ConfigError, match=r"--held-out: .* cannot be read"):
        read_preferences(str(tmp_path / "none.jsonl"), Tokens(), 40, "--held-out")


def test_no_prompt_is_both_trained_on_and_held_out() -> None:
    preferences = [Preference((prompt,), (1, at), (2, at)) for prompt in range(20) for at in range(3)]
    train, held_out = split(preferences, 0.1, seed=1)
    assert len(held_out) == 6
    assert len(train) == 54
    assert not {each.prompt_ids for each in train} & {each.prompt_ids for each in held_out}
    assert split(preferences, 0.1, seed=1) == (train, held_out)
    assert split(preferences, 0.1, seed=2) != (train, held_out)
    assert split(preferences, 0.0, seed=1) == (preferences, [])
    with pytest.raises(ValueError, match="too few to hold out"):
        split(preferences[:3], 0.5, seed=1)


def test_agreement_and_its_interval() -> None:
    agreement = Agreement.of([1.0, 2.0, 0.0, 5.0], [0.0, 3.0, 0.0, 4.0])
    assert agreement == Agreement(0.625, 4)
    low, high = Agreement(0.8, 100).interval
    assert (low, high) == pytest.approx((0.7112, 0.8666), abs=1e-3)  # from a table of Wilson's intervals
    assert Agreement(1.0, 10).interval[1] == 1.0
