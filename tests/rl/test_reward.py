"""The configured reward in the scoring processes: sums, faults, and what a request may name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rl.scoring_rig import LONG_S, SHORT_S, group

from mlx_parallm.config import configure
from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.rl.configured_reward import reward_key
from mlx_parallm.rl.scoring.judges import Judge
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.scorers import RewardSpec, Term, read_reward
from mlx_parallm.rl.scoring.service import ScorerCatalogue, ScoringService

SOURCE = """
import time

def correct(completions, answer, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def short(sample):
    return 1 / len(sample.completion_ids)

def first_only(completions):
    return [1.0] + [None] * (len(completions) - 1)

def not_a_number(sample):
    return float("nan")

def prompts_are(prompts, completions):
    return [float(len(prompt)) for prompt in prompts]

def hangs(completions):
    time.sleep(1000)

async def hangs_async(sample):
    import asyncio
    await asyncio.sleep(1000)

def too_few(completions):
    return []

def breaks(sample):
    return 1 / 0
"""


@pytest.fixture
async def scoring(tmp_path: Path):
    """Makes a service whose reward is an expression in which F is the path of SOURCE."""
    (tmp_path / "rewards.py").write_text(SOURCE)
    made: list[ScoringService] = []

    def make(expression: str, timeout_s: float = LONG_S) -> ScoringService:
        spec = RewardSpec(read_reward(expression.replace("F", f"{tmp_path}/rewards.py")))
        made.append(ScoringService(1, 32, timeout_s, spec))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def rewarded(*texts: str, prompt_text: str = "", messages: tuple[dict[str, str], ...] = (), **metadata: object):
    return [
        replace(trajectory, collection=replace(trajectory.collection, prompt_text=prompt_text, messages=messages))
        for trajectory in group("reward", *texts, **metadata)
    ]


# ---- what is compared after a restart ------------------------------------------------------------


def test_mean_rewards_are_comparable_until_what_they_are_computed_from_changes(tmp_path: Path) -> None:
    reward, tasks, prompt = (tmp_path / name for name in ("rewards.py", "tasks.py", "prompt.txt"))
    for file in (reward, tasks, prompt):
        file.write_text("# one\n")
    keys = {"reward": f"{reward}:f", "environment": f"{tasks}:E", "system_prompt": f"@{prompt}"}

    def key(**changed: object) -> float:
        return reward_key(configure(**{f"rl_training__{name}": value for name, value in {**keys, **changed}.items()}))

    seen = {
        key(),
        key(reward=f"0.5*{reward}:f + 0.5*exact"),
        key(environment="words"),
        key(system_prompt="be brief"),
        key(max_completion_tokens=7),
    }
    assert key() in seen
    assert key(optimizer__learning_rate=1e-3, seed=3) in seen
    for file in (reward, tasks, prompt):
        file.write_text("# another\n")
        seen.add(key())
    assert len(seen) == 8


# ---- rewards -------------------------------------------------------------------------------------


async def test_a_sum_of_functions_and_of_scorers_by_name(scoring) -> None:
    service = scoring("0.5*F:correct + 0.2*F:short + 0.3*exact")
    assert await service.score(rewarded("a", "b", answer="a")) == (pytest.approx(0.85), pytest.approx(0.05))


async def test_what_does_not_apply_adds_nothing_and_a_sample_without_any_reward_costs_the_group(scoring) -> None:
    assert await scoring("1*F:first_only + 0.5*F:correct").score(rewarded("a", "a", answer="a")) == (1.5, 0.5)
    with pytest.raises(ScoringError, match="no reward applies to sample 2: every function returned None"):
        await scoring("F:first_only").score(rewarded("a", "a"))


async def test_a_request_may_use_it_as_a_part_of_a_sum(scoring) -> None:
    samples = group("0.5*reward + 0.5*exact", "a", "b", answer="a")
    assert await scoring("F:correct").score(samples) == (1, 0)


async def test_the_prompt_is_a_text_or_the_messages(scoring) -> None:
    service, turns = scoring("F:prompts_are"), ({"role": "user", "content": "x"},) * 2
    assert await service.score(rewarded("a", prompt_text="abc", messages=turns)) == (3,)
    assert await service.score(rewarded("a", messages=turns)) == (2,)


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("breaks", r"^reward: rewards\.py:\d+: ZeroDivisionError: division by zero$"),
        ("too_few", r"^reward: rewards\.py:too_few returned 0 rewards for 2 completions$"),
        ("not_a_number", r"^reward: ValueError: gave nan; a reward must be a finite number$"),
        ("gone", r"^reward: rewards\.py has no function gone"),
    ],
)
async def test_a_fault_costs_its_group_and_is_kept_for_the_operator(scoring, function: str, message: str) -> None:
    service = scoring(f"F:{function}")
    with pytest.raises(ScoringError, match=message) as caught:
        await service.score(rewarded("a", "b"))
    assert service.last_fault == str(caught.value)
    assert await service.score(group("exact", "a", answer="a")) == (1,)


@pytest.mark.parametrize("function", ["hangs", "hangs_async"])
async def test_a_function_that_hangs_is_killed_and_others_are_scored(scoring, function: str) -> None:
    service = scoring(f"F:{function}", SHORT_S)
    with pytest.raises(ScoringError, match=r"took more than 2 s; rl_training\.scoring_timeout_s is the limit"):
        await service.score(rewarded("a", "b"))
    assert await service.score(group("exact", "a", answer="a")) == (1,)


# ---- names ---------------------------------------------------------------------------------------


def test_a_reward_is_one_term_or_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_reward("rewards.py:score") == (Term(1, f"{tmp_path}/rewards.py:score"),)
    assert read_reward("0.7*my rewards.py:a + 0.2*/x/b.py:b+.1*pkg.mod:c") == (
        Term(0.7, f"{tmp_path}/my rewards.py:a"),
        Term(0.2, "/x/b.py:b"),
        Term(0.1, "pkg.mod:c"),
    )
    assert read_reward("0.5*judge + 0.5*rank") == (Term(0.5, "judge"), Term(0.5, "rank"))


@pytest.mark.parametrize("text", ["", "rewards.py", "a.py:x + b.py:y", "0.5*reward", "reward", "1*a.py:b,", "a.py:b()"])
def test_a_reward_that_cannot_be_read_says_what_it_may_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward: .* cannot be read: give FILE\.py:NAME, judge, rank"):
        read_reward(text)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("F:correct", None),
        ("0.5*F:correct + 0.5*exact", None),
        ("F:corect", "rewards.py has no function corect; did you mean correct"),
        ("0.5*F:correct + 0.5*exactt", "'exactt' is unknown: did you mean exact"),
        ("gone.py:score", r"there is no file .*gone\.py"),
    ],
)
def test_the_reward_is_checked_before_anything_is_scored(tmp_path: Path, term: str, message: str | None) -> None:
    (tmp_path / "rewards.py").write_text(SOURCE)
    catalogue = ScorerCatalogue(RewardSpec(read_reward(term.replace("F", f"{tmp_path}/rewards.py"))))
    if message is None:
        catalogue.check_reward()
    else:
        with pytest.raises(ConfigError, match=f"^reward: .*{message}"):
            catalogue.check_reward()


async def test_a_request_can_name_neither_a_file_nor_a_module(scoring, tmp_path: Path) -> None:
    """Not even the configured one, and not in a sum."""
    service = scoring("0.5*F:correct + 0.5*json.decoder:scanstring")
    for name in (
        "rewards.py:correct",
        f"{tmp_path}/rewards.py:correct",
        "json.decoder:scanstring",
        "0.5*reward + 0.5*json.decoder:scanstring",
        "judge",
        "rank",
    ):
        with pytest.raises(InvalidRequestError, match=r"is unknown|cannot be read"):
            await service.check(CollectionSpec(name, {}))
        with pytest.raises(ScoringError, match=r"unknown|cannot be read"):
            await service.score(group(name, "a"))


async def test_a_request_that_names_a_reward_where_there_is_none_is_refused(service) -> None:
    with pytest.raises(InvalidRequestError, match="no reward is configured; the operator sets one with --reward"):
        await service().check(CollectionSpec("reward", {}))


async def test_a_request_must_bring_what_named_scorers_of_the_reward_read(scoring) -> None:
    service = scoring("0.5*F:correct + 0.5*regex")
    await service.check(CollectionSpec("reward", {"pattern": "a"}))
    for metadata, message in (({}, "metadata.pattern is missing"), ({"pattern": "("}, "is not a regular expression")):
        with pytest.raises(InvalidRequestError, match=message):
            await service.check(CollectionSpec("reward", metadata))


def test_the_definition_changes_with_the_files_the_weights_and_the_judge_and_holds_no_key(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(SOURCE)

    def definition(text: str = f"0.9*{file}:correct + 0.1*judge", **judge: str) -> str:
        return RewardSpec(read_reward(text), Judge(**judge)).definition

    first = definition()
    assert definition() == definition(api_key="s3cret") == first
    assert len({first, definition(f"0.8*{file}:correct + 0.2*judge"), definition(instruction="Be kind.")}) == 3
    file.write_text(SOURCE + "\n")
    assert definition() != first
