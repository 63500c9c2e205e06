"""What counts as diverged, and what does not; and what is done then."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from configs import TRAINING, changed, limited
from rl.rig import NAME, SETTINGS, Rig, opened, ref

from mlx_parallm.config import Action, DivergenceConfig, ResolvedTraining
from mlx_parallm.rl.divergence import DivergenceWatch
from mlx_parallm.rl.status import UpdateReport

HEALTHY = {
    "loss": 0.1,
    "kl_step": 0.1,
    "ratio_mean": 1.0,
    "kl": 0.5,
    "entropy": 2.0,
    "completion_tokens": 20.0,
    "reward_mean": 0.5,
}
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"


def acting(signal: str, action: Action, settings: ResolvedTraining = SETTINGS) -> ResolvedTraining:
    rule = changed(getattr(settings.divergence, signal), action=action)
    return settings.model_copy(update={"divergence": settings.divergence.model_copy(update={signal: rule})})


def watch(limits: DivergenceConfig | None = None) -> DivergenceWatch:
    return DivergenceWatch(NAME, limits or DivergenceConfig(), lambda kind, **data: None, lambda: True)


def rules_of(course: Sequence[Mapping[str, float]] = (HEALTHY,) * 5) -> DivergenceWatch:
    rules = watch()
    rules.restart(course)
    return rules


def signals(rules: DivergenceWatch, **metrics: float) -> list[str]:
    return [found.signal for found in rules.judge(HEALTHY | metrics)]


# ---- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "signal"),
    [
        ({"loss": math.nan}, "not_finite"),
        ({"kl_step": 2.1}, "kl_step"),
        ({"ratio_mean": 2.1}, "ratio"),
        ({"ratio_mean": 0.49}, "ratio"),
        ({"entropy": 0.19, "reward_mean": 0.4}, "entropy"),
        ({"completion_tokens": 61.0, "reward_mean": 0.4}, "length"),
    ],
)
def test_each_signal_is_noticed_at_the_first_update_that_shows_it(metrics: dict[str, float], signal: str) -> None:
    assert signals(rules_of(), **metrics) == [signal]
    assert signals(rules_of()) == []


def test_one_large_estimate_of_the_distance_from_the_base_is_chance_and_two_are_not() -> None:
    rules = rules_of()
    assert signals(rules, kl=700.0) == []
    rules.accept(HEALTHY | {"kl": 700.0})
    assert signals(rules, kl=0.5) == []
    assert signals(rules, kl=12.0) == ["kl"]


def test_a_policy_whose_answers_become_better_may_become_certain_or_long() -> None:
    assert signals(rules_of(), entropy=0.001, reward_mean=0.6) == []
    assert signals(rules_of(), completion_tokens=200.0, reward_mean=0.6) == []


def test_the_first_updates_and_imitated_completions_are_compared_with_nothing() -> None:
    collapsed = {"entropy": 0.001, "completion_tokens": 200.0, "reward_mean": 0.0}
    assert signals(rules_of([HEALTHY] * 2), **collapsed) == []
    without_rewards = {name: value for name, value in (HEALTHY | collapsed).items() if name != "reward_mean"}
    assert rules_of().judge(without_rewards) == ()


def test_a_signal_without_a_limit_is_not_judged() -> None:
    none = limited(TRAINING, kl_step=None, ratio=None, kl=None, entropy=None, length=None, reward=None)
    rules = watch(none.divergence)
    rules.restart([HEALTHY | {"kl": 99.0}] * 5)
    wild = {"kl_step": 1e6, "ratio_mean": 1e6, "kl": 1e6, "entropy": 1e-6, "completion_tokens": 1e6}
    assert rules.judge(HEALTHY | wild | {"reward_mean": 0.0}) == ()


def recorded() -> Iterator[tuple[str, list[dict[str, float]]]]:
    """The metrics of the updates of every healthy run in the records that has them."""
    for name in ("learning", "hint"):
        for number, run in enumerate(json.loads((RECORDS / f"{name}.json").read_text())["runs"]):
            yield f"{name} {run['task']} {number}", [_known(update["metrics"]) for update in run["updates"]]
    for run in json.loads((RECORDS / "stability.json").read_text())["runs"]:
        yield f"stability {run['seed']}", [_known(version["metrics"]) for version in run["versions"]]


def _known(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if value is not None}


def test_the_defaults_find_nothing_in_the_healthy_runs_on_record() -> None:
    updates, alarms = 0, []
    for name, course in recorded():
        rules = watch()
        for number, metrics in enumerate(course):
            if "entropy" not in metrics:  # skipped
                continue
            updates += 1
            alarms += [(name, number, found.reason) for found in rules.judge(metrics)]
            rules.observe(metrics)
            rules.accept(metrics)
    assert alarms == []
    assert updates > 300


# ---- what is done --------------------------------------------------------------------------------


async def updated_with(rig: Rig, **metrics: float) -> UpdateReport:
    rig.learner.metrics = HEALTHY | metrics
    return await rig.updated(1.0, 0.0)


async def healthy(settings: ResolvedTraining = SETTINGS) -> Rig:
    """A rig after four updates; version 4 is live, and version 2 the best."""
    rig = await opened(settings=settings)
    rig.learner.metrics = HEALTHY
    for mean in (0.5, 0.6, 0.7, 0.6):
        await rig.updated_at(mean)
    assert rig.loop.status().best == ref(2)
    assert rig.loop.status().diverged == {}
    rig.events.clear()
    return rig


def divergences(rig: Rig) -> list[tuple[object, object]]:
    return [(data["signal"], data["action"]) for kind, data in rig.events if kind == "divergence"]


async def test_told_is_told_and_the_version_goes_live() -> None:
    rig = await healthy()
    report = await updated_with(rig, completion_tokens=100.0, reward_mean=0.0)
    assert (report.status, report.adapter) == ("published", ref(5))
    assert divergences(rig) == [("length", "tell")]
    event = dict(next(data for kind, data in rig.events if kind == "divergence"))
    assert "100 is above 3 times" in str(event.pop("reason"))
    assert event == {
        "adapter": NAME,
        "version": "math@5",
        "step": 4,
        "signal": "length",
        "value": 100.0,
        "limit": 3.0,
        "action": "tell",
    }
    status = rig.loop.status()
    assert status.diverged == {("length", "tell"): 1}
    assert [found.signal for found in status.last_divergences] == ["length"] == [d.signal for d in report.divergences]
    rig.check()


async def test_a_held_version_is_never_live_and_three_in_a_row_pause_training() -> None:
    rig = await healthy()
    for _ in range(2):
        assert (await updated_with(rig, kl_step=50.0)).status == "held"
    assert rig.loop.status().state != "paused"
    report = await updated_with(rig, kl_step=50.0)
    assert (report.status, report.adapter, report.step) == ("held", ref(4), 4)
    assert list(rig.publisher.versions) == [ref(1), ref(2), ref(3), ref(4)]
    assert divergences(rig) == [("kl_step", "hold")] * 3
    assert rig.loop.status().state == "paused"
    assert "3 updates in a row were skipped or held" in str(rig.loop.status().pause_reason)
    rig.loop.resume()
    for state in ("running", "running", "paused"):
        await updated_with(rig, kl_step=50.0)
        assert (rig.loop.status().state == "paused") == (state == "paused")
    rig.check()


async def test_a_pause_holds_the_version_and_a_resume_is_not_undone_by_the_same_state() -> None:
    rig = await healthy()
    report = await updated_with(rig, entropy=0.001, reward_mean=0.0)
    assert (report.status, report.adapter) == ("held", ref(4))
    assert rig.loop.status().state == "paused"
    assert divergences(rig) == [("entropy", "pause")]
    rig.loop.resume()
    assert (await updated_with(rig, entropy=0.001, reward_mean=0.0)).status == "published"
    assert rig.loop.status().state != "paused"
    rig.check()


async def test_a_rollback_brings_back_the_best_version() -> None:
    rig = await healthy(acting("ratio", Action.ROLL_BACK))
    report = await updated_with(rig, ratio_mean=9.0)
    assert (report.status, report.adapter, report.step) == ("held", ref(2), 2)
    assert rig.publisher.names[NAME] == ref(2) == rig.training.versions.latest
    assert rig.learner.policies[NAME] == (2.0, 2)
    assert divergences(rig) == [("ratio", "roll_back")]
    assert rig.kinds.count("rollback") == 1
    assert (await updated_with(rig)).status == "published", "training continues from there"
    rig.check()


# ---- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "status", "live"), [(Action.ROLL_BACK, "skipped", 2), (Action.PAUSE, "skipped", 3)])
async def test_a_collapse_of_rewards_is_noticed_at_the_next_update(action: Action, status: str, live: int) -> None:
    rig = await opened(settings=acting("reward", action))
    for mean in (0.5, 0.6, 0.9):  # drawn by the base, versions 1 and 2
        await rig.updated_at(mean)
    report = await rig.updated_at(0.0)
    assert (report.status, report.adapter) == (status, ref(live))
    assert divergences(rig) == [("reward", action)]
    assert (rig.loop.status().state == "paused") is (action is Action.PAUSE)
    rig.check()


@pytest.mark.parametrize("reward_is_another", [False, True])
async def test_lower_rewards_after_a_restart_are_no_collapse_if_they_are_computed_otherwise(
    reward_is_another: bool,
) -> None:
    """A stricter reward has the name of the one before."""
    rig = await opened()
    for mean in (0.5, 0.6, 0.9):
        await rig.updated_at(mean)
    await rig.loop.close()
    rig.reward_key += reward_is_another
    rig.restart()
    await rig.loop.open()
    rig.events.clear()
    report = await rig.updated_at(0.0)
    if not reward_is_another:
        assert (report.status, divergences(rig)) == ("skipped", [("reward", "roll_back")])
        return
    assert (report.status, report.adapter, divergences(rig)) == ("published", ref(4), [])
    assert rig.loop.status().reward_running_mean == 0.0
    for _ in range(2):
        await rig.updated_at(0.5)
    assert rig.loop.status().best == ref(5), "the best under the new reward"
    rig.check()


# ---- the settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"reward": {"action": "hold"}}, "rewards are of live ones"),
        ({"not_finite": {"action": "tell"}}, "would publish numbers that are not finite"),
        ({"webhook": "hooks.example.org/T000"}, "webhook must begin with http"),
        ({"webhook": "ftp://example.org/x"}, "webhook must begin with http"),
    ],
)
def test_an_action_that_can_do_nothing_is_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DivergenceConfig.model_validate(settings)
