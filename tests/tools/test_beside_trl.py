"""The part of the comparison with TRL that needs no PyTorch: what both sides are asked and what they earn."""

from itertools import islice

import numpy as np
import pytest

from benchmarks.lib.training.beside_cells import gradients_apart
from benchmarks.lib.training.beside_tasks import GRADIENTS, TASKS, Order, Said, between_turns, preferences

WORDS_TASK, SUMS = TASKS["both words"], TASKS["sums"]


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_both_sides_the_same_prompts(name: str) -> None:
    mine, theirs = (list(islice(TASKS[name].training(3), 12)) for _ in range(2))
    assert [each.text for each in mine] == [each.text for each in theirs]
    assert [each.text for each in islice(TASKS[name].training(4), 12)] != [each.text for each in mine]


def test_the_second_turn_asks_for_the_word_that_was_not_said() -> None:
    prompt = next(WORDS_TASK.training(0))
    one, other = prompt.metadata["words"]
    first = Said(f"{other.title()}.", ended=True)
    assert WORDS_TASK.follow_up(prompt, first) == f"You said {other}. Say only the other word."
    assert WORDS_TASK.rewarded(prompt, [first, Said(one, ended=True)]) == pytest.approx(1.0)
    assert WORDS_TASK.rewarded(prompt, [first, Said(other, ended=True)]) == pytest.approx(0.5)
    assert WORDS_TASK.rewarded(prompt, [first, Said(f"It is {one}", ended=False)]) == pytest.approx(0.65)


def test_a_first_answer_with_both_words_or_none_earns_nothing_and_is_asked_again() -> None:
    prompt = next(WORDS_TASK.training(0))
    one, other = prompt.metadata["words"]
    for text in (f"{one}, {other}", "hello"):
        first = Said(text, ended=True)
        assert one in str(WORDS_TASK.follow_up(prompt, first))
        assert WORDS_TASK.rewarded(prompt, [first, Said(one, ended=True)]) == pytest.approx(0.5)


def test_a_sum_earns_one_for_the_right_number_at_the_end() -> None:
    prompt = next(SUMS.training(0))
    right, solution = prompt.metadata["answer"], prompt.metadata["solution"]
    first, sign, second = solution.split()[:3]
    assert int(first) + int(f"{sign}{second}") == right
    assert SUMS.rewarded(prompt, [Said(f"{solution}\n#### {right}", ended=True)]) == 1
    assert SUMS.rewarded(prompt, [Said(f"{solution}\n#### {right}", ended=False)]) == 0
    assert SUMS.rewarded(prompt, [Said(f"{solution}\n#### {right + 1}", ended=True)]) == 0
    assert SUMS.rewarded(prompt, [Said(f"{solution}", ended=True)]) == 0


def test_an_answer_that_was_cut_off_is_ended_before_the_next_turn() -> None:
    assert between_turns("Go on.", ended=False) == "<|im_end|>" + between_turns("Go on.", ended=True)


def test_preferences_ask_no_question_twice_and_prefer_the_right_class() -> None:
    pairs = preferences(slice(0, 16), 0, 200)
    assert len({pair.prompt for pair in pairs}) == len(pairs) == 200
    assert all({pair.chosen, pair.rejected} == {"Positive.<|im_end|>", "Negative.<|im_end|>"} for pair in pairs)
    charming = next(pair for pair in pairs if "charming" in pair.prompt)
    assert charming.chosen.startswith("Positive")


def test_an_order_is_read_as_it_was_written(tmp_path) -> None:
    order = Order("dapo", "model", "adapter", "folder", task="sums", setting={"group": 2})
    order.write(tmp_path / "order.json")
    read = Order.read(tmp_path / "order.json")
    assert read == order
    assert read.hyper.group == 2


def test_gradients_are_compared_with_peft_s_transposed_ones(tmp_path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    a = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.savez(ours / GRADIENTS, **{"layers.0.q_proj.lora_a": 2 * a})
    np.savez(theirs / GRADIENTS, **{"base_model.model.layers.0.q_proj.lora_A.default.weight": a.T})
    assert gradients_apart(ours, theirs, ratio=2.0) == 0
    assert gradients_apart(ours, theirs) == pytest.approx(1.0)
