"""Reward functions of a file: their signatures, what they are given, and what loading one can fail with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_parallm.rl.scoring import own_functions
from mlx_parallm.rl.scoring.own_functions import load_function
from mlx_parallm.rl.scoring.sample import ScorerError, ScorerInput

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 ="})


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes rewards.py, and returns the reference of one of its functions. What it imports is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(source: str, name: str = "score") -> str:
        (tmp_path / "rewards.py").write_text(source)
        return f"{tmp_path}/rewards.py:{name}"

    yield write
    own_functions.module_of_file.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def samples(*texts: str, prompt: object = "2 + 2 =", **metadata: object) -> list[ScorerInput]:
    return [
        ScorerInput(text, 3, len(text), "stop", metadata, prompt, (1, 2, 3), tuple(range(len(text)))) for text in texts
    ]


def scored(reference: str, *texts: str, **metadata: object) -> list[float | None]:
    return list(load_function(reference)(samples(*texts, **metadata)))


def fault(reference: str, *texts: str, **metadata: object) -> str:
    with pytest.raises(ScorerError) as caught:
        scored(reference, *(texts or ("a",)), **metadata)
    return str(caught.value)


# ---- signatures ----------------------------------------------------------------------------------


def test_trl_gets_the_group_in_lists_with_the_columns(write) -> None:
    source = """
def score(prompts, completions, completion_ids, level, **kwargs):
    assert prompts == ["2 + 2 ="] * 2
    assert kwargs["prompt_ids"] == [[1, 2, 3]] * 2
    assert completion_ids == [[0], [0, 1]]
    assert kwargs["answer"] == ["4", "4"]
    kwargs["log_metric"]("mean", 1.0)
    return [level[at] + len(text) for at, text in enumerate(completions)]
"""
    assert scored(write(source), "4", "44", answer="4", level=10) == [11, 12]


def test_trl_gets_completions_of_message_prompts_as_messages(write) -> None:
    """TRL's own example of a reward function for conversations."""
    source = """
def score(completions, ground_truth, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert [completion[0]["role"] for completion in completions] == ["assistant"] * len(completions)
    assert kwargs["prompts"][0][1]["content"] == "2 + 2 ="
    return [1.0 if content == gt else 0.0 for content, gt in zip(contents, ground_truth)]
"""
    assert scored(write(source), "4", "5", prompt=CHAT, ground_truth="4") == [1, 0]


def test_none_means_that_the_function_does_not_apply(write) -> None:
    source = "def score(completions): return [None if text == 'x' else 1 for text in completions]"
    assert scored(write(source), "x", "y") == [None, 1]


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ("completion, answer", "float(completion == answer)"),
        ("prompt, completion, answer, state, task, info", "float(state['completion'] == answer and info == {'a': 1})"),
        ("state", "float(state['completion'] == state['answer'] and state['finish_reason'] == 'stop')"),
        ("completion, **kwargs", "float(kwargs['answer'] == completion and kwargs['task'] == 'default')"),
        ("completion, level, unknown=3", "float(completion == '4' and level == 7 and unknown == 3)"),
    ],
)
def test_verifiers_gets_one_sample_by_any_of_its_names(write, parameters: str, value: str) -> None:
    reference = write(f"def score({parameters}): return {value}")
    assert scored(reference, "4", "5", answer="4", info='{"a": 1}', level=7) == [1, 0]


def test_verifiers_gets_messages_for_a_prompt_of_messages(write) -> None:
    source = "def score(prompt, completion): return len(prompt) + (completion[-1]['content'] == '4')"
    assert scored(write(source), "4", "5", prompt=CHAT) == [3, 2]


def test_a_plain_function_gets_the_sample(write) -> None:
    source = """
def score(sample):
    assert sample.messages == [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": sample.text}]
    assert (list(sample.prompt_ids), sample.finish_reason, sample.ended) == ([1, 2, 3], "stop", True)
    return len(sample.completion_ids) + sample.metadata["bonus"]
"""
    assert scored(write(source), "a", "bc", bonus=10) == [11, 12]


@pytest.mark.parametrize(
    "source",
    [
        "async def score(sample): await sleep(0); return len(sample.text)",
        "async def score(completion, answer): await sleep(0); return len(completion)",
        "async def score(completions, **kwargs): await sleep(0); return [len(text) for text in completions]",
        "class Later:\n    async def __call__(self, sample):\n        return len(sample.text)\nscore = Later()",
    ],
)
def test_a_function_may_be_async(write, source: str) -> None:
    assert scored(write(f"from asyncio import sleep\n{source}"), "a", "bc", answer="a") == [1, 2]


def test_async_samples_are_scored_at_the_same_time_and_in_one_loop_for_good(write) -> None:
    source = """
import asyncio
met, loops = [], set()

async def score(sample):
    loops.add(id(asyncio.get_running_loop()))
    met.append(sample)
    while len(met) % 3:
        await asyncio.sleep(0)
    return len(loops)
"""
    score = load_function(write(source))
    assert [list(score(samples("a", "b", "c"))) for _ in range(2)] == [[1, 1, 1], [1, 1, 1]]


def test_numbers_of_other_kinds_are_rewards(write) -> None:
    source = """
import fractions
def score(completions): return iter([True, fractions.Fraction(1, 2), 3])
"""
    assert scored(write(source), "a", "b", "c") == [1, 0.5, 3]


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(completions): return [1.0]", "rewards.py:score returned 1 rewards for 2 completions"),
        ("def score(completions): return 1.0", "must return a list of 2 rewards, not float"),
        ("def score(completions): return 'no'", "must return a list of 2 rewards, not str"),
        ("def score(completions): return ['1', '2']", "rewards.py:score gave str, not a number"),
        ("def score(sample): return [1.0]", "rewards.py:score gave list, not a number"),
        ("def score(sample):\n\n    return sample.metadata['nothing']", "rewards.py:3: KeyError: 'nothing'"),
        ("def score(sample): raise SystemExit(3)", "rewards.py:1: SystemExit: 3"),
        ("async def score(sample):\n    raise ValueError('late')", "rewards.py:2: ValueError: late"),
        ("def score(completion, wanted): return 1", "asks for wanted: no such column of its tasks; they have level"),
        ("import json\ndef score(sample): return json.loads('{')", "rewards.py:2: JSONDecodeError"),
    ],
)
def test_a_function_that_fails_says_what_and_where(write, source: str, message: str) -> None:
    assert message in fault(write(source), "a", "b", level=1)


def test_a_module_beside_the_file_is_imported_and_named_when_it_fails(write, tmp_path: Path) -> None:
    (tmp_path / "beside_rewards.py").write_text("def parse(text):\n    return float(text)\n")
    reference = write("from beside_rewards import parse\ndef score(sample): return parse(sample.text)")
    assert scored(reference, "2.5") == [2.5]
    assert fault(reference, "x").startswith("beside_rewards.py:2: ValueError: could not convert")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def score(sample): return 1", "scor", "rewards.py has no function scor; did you mean score?"),
        ("import json", "score", "rewards.py has no function score; it has none"),
        ("score = 3", "score", "rewards.py: score is not a function"),
        ("class score:\n    pass", "score", "rewards.py: score is not a function"),
        ("def score(:", "score", "rewards.py:1: SyntaxError"),
        ("x = 1\nimport no_such_module_at_all", "score", "rewards.py:2: ModuleNotFoundError: No module named"),
        ("raise SystemExit", "score", "rewards.py:1: SystemExit"),
        ("def score(text, wanted): return 1", "score", "a reward function takes (prompts, completions, ...) as in TRL"),
        ("def score(): return 1", "score", "a reward function takes"),
    ],
)
def test_what_cannot_be_loaded_says_why(write, source: str, name: str, message: str) -> None:
    with pytest.raises(ScorerError) as caught:
        load_function(write(source, name))
    assert message in str(caught.value)


def test_a_file_or_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match=r"there is no file .*gone\.py"):
        load_function(f"{tmp_path}/gone.py:score")
    with pytest.raises(ScorerError, match=r"no_such_package.rewards cannot be imported: .*for a file, write FILE\.py"):
        load_function("no_such_package.rewards:score")


def test_a_module_of_a_package_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards").mkdir()
    (tmp_path / "user_rewards" / "__init__.py").touch()
    (tmp_path / "user_rewards" / "film.py").write_text("def score(sample): return len(sample.text)")
    monkeypatch.syspath_prepend(tmp_path)
    assert scored("user_rewards.film:score", "abc") == [3]


def test_two_files_of_one_name_are_two_modules(tmp_path: Path, write) -> None:
    references = []
    for reward, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "rewards.py"
        file.write_text(f"def score(sample): return {reward}")
        references.append(f"{file}:score")
    write("")
    assert [scored(reference, "a") for reference in references] == [[0], [1]]
