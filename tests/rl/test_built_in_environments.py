"""The environments that come with the package: what they reward, and what the calculator computes."""

from __future__ import annotations

from itertools import islice

import pytest
from rl.rollout_rig import END, last_message, rig

from mlx_parallm.rl.environments import environment, is_of_episodes
from mlx_parallm.rl.environments.builtin import calculated
from mlx_parallm.rl.scoring.sample import ScorerInput
from mlx_parallm.rl.scoring.scorers import load


def test_words_are_scored_by_their_class_alone():
    tasks = list(islice(environment("words").tasks(0), 40))
    assert not is_of_episodes(environment("words"))
    kinds = ["negative" if "negative" in task.collection.metadata["pattern"] else "positive" for task in tasks]
    assert kinds == ["positive", "negative"] * 20
    task = next(task for task in environment("words").tasks(0) if "superb" in task.messages[0]["content"])
    scorer = load(task.collection.scorer)

    def rewards(*texts):
        return [scorer([ScorerInput(text, 9, 3, "stop", task.collection.metadata)])[0] for text in texts]

    assert rewards("positive", "Positive.", "It is positive.", "negative", "") == [1, 1, 0, 0, 0]


async def test_a_wrong_answer_gets_a_hint_and_a_second_turn():
    right = {}

    def answer(request):
        task = request.collection.metadata["answer"]
        if last_message(request).startswith("No."):
            assert f"letter {task[0]}" in last_message(request)
            return task if request.collection.episode_id.endswith("1") else "no idea"
        right[task] = True
        return f"{task.capitalize()}." if request.collection.episode_id.endswith("0") else "house"

    async with rig(environment("hints"), answer, group_size=3) as world:
        drawn = await world.draw(4)
        assert (drawn.failures, drawn.faults) == ((), ())
        assert [list(rewards.values()) for _, rewards in world.groups] == [[1.0, 0.5, 0.0]] * 4
        for turns, _ in world.groups:
            first, second = (turn for turn in turns if turn.collection.episode_id.endswith("1"))
            assert second.prompt_ids[: len(first.prompt_ids) + 6] == (*first.prompt_ids, *map(ord, "house"), END)


async def test_the_calculators_results_are_the_next_messages():
    def answer(request):
        content, metadata = last_message(request), request.collection.metadata
        match request.collection.episode_id[-1]:
            case "0":  # calls it, and repeats the result
                return content.removeprefix("result: ") if "result" in content else f"calc: {content[8:-1]}"
            case "1":  # guesses, with the right number
                return metadata["answer"]
            case "2":  # never stops calling
                return "calc: 1+1"
            case "3":  # calls it wrongly, reads the error, and answers
                return metadata["answer"] if "error" in content else "calc: import os"
            case _:
                return f"{metadata['answer']}…"

    async with rig(environment("calculator"), answer, group_size=5) as world:
        drawn = await world.draw(2)
        assert (drawn.failures, drawn.faults) == ((), ())
        for turns, rewards in world.groups:
            assert list(rewards.values()) == [1.0, 1.0, 0.0, 1.0, 0.0]
            lengths = [sum(turn.collection.episode_id == episode for turn in turns) for episode in rewards]
            assert lengths == [2, 1, 3, 2, 1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("12*34", "408"),
        (" (1 + 2) * -3 ", "-9"),
        ("7/2", "3.5"),
        ("1/3", "0.333333"),
        ("1/0", "error: division by zero"),
        ("9**9**9**9", "error: only numbers and + - * / are known"),
        ("999999*999999*999999", "error: the number is too large"),
        ("1e999-1e999", "error: the number is too large"),
        ("__import__('os')", "error: only numbers and + - * / are known"),
        ("a.b", "error: only numbers and + - * / are known"),
        ("True+1", "error: only numbers and + - * / are known"),
        ("1j*1j", "error: only numbers and + - * / are known"),
        ("'a'*99", "error: only numbers and + - * / are known"),
        ("(" * 40, "error: write an expression such as 12*34"),
        ("(" * 61, "error: at most 60 characters"),
        ("-" * 59 + "1", "-1"),
        ("", "error: write an expression such as 12*34"),
        ("1\x00", "error: write an expression such as 12*34"),
        ("9" * 60, "error: the number is too large"),
    ],
)
def test_the_calculator_computes_arithmetic_and_nothing_else(text, shown):
    assert calculated(text) == shown
