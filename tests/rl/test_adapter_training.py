"""What goes live, what is put back, and what a restart goes on from."""

from __future__ import annotations

import asyncio
import math

import pytest
from configs import changed, limited
from rl.fakes import policy
from rl.rig import NAME, SETTINGS, Rig, opened, ref, settle

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.config import ResolvedTraining
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import (
    AdapterUnavailableError,
    ConflictError,
    UnknownModelError,
)
from mlx_parallm.rl.status import EvaluationResult
from mlx_parallm.rl.trajectories import DropReason


async def test_an_update_that_is_not_published_is_in_the_next_one_that_is() -> None:
    rig = await opened()
    report = await rig.updated(1.0, 0.0, publish=False)
    assert (report.status, report.adapter, report.step) == ("trained", None, 1)
    assert rig.publisher.versions == {}
    assert rig.training.versions.latest == BASE_ADAPTER
    report = await rig.updated(1.0, 0.0)
    assert not rig.learner.batches[1].samples[0].on_policy, "the base drew it, and the policy is ahead of the base"
    assert (report.status, report.adapter, report.step) == ("published", ref(1), 2)
    assert rig.publisher.versions[ref(1)] == 2.0
    await rig.updated(1.0, 0.0)
    assert rig.learner.batches[2].samples[0].on_policy
    assert rig.loop.status().updates_total == 3
    rig.check()


@pytest.mark.parametrize(
    ("settings", "metrics", "code"),
    [
        (SETTINGS, {"loss": math.nan}, "held_not_finite"),
        (SETTINGS, {"kl": math.inf}, "held_not_finite"),
        (limited(SETTINGS, kl_step=0.1), {"kl_step": 0.11}, "held_kl_step"),
    ],
)
async def test_a_held_update_leaves_policy_and_versions_as_before(
    settings: ResolvedTraining, metrics: dict[str, float], code: str
) -> None:
    rig = await opened(settings=settings)
    rig.learner.metrics = {"loss": 0.5, "kl_step": 0.1}
    assert (await rig.updated(1.0, 0.0)).status == "published"
    rig.learner.metrics = metrics
    group = rig.drawn(1.0, 0.0)
    report = await rig.loop.update(None)
    assert (report.status, report.adapter, report.step) == ("held", ref(1), 1)
    assert all(map(math.isfinite, report.metrics.values()))
    assert [member.reason for member in group.members] == [DropReason.HELD] * 2
    assert rig.loop.status().skips == {code: 1}
    assert list(rig.publisher.versions) == [ref(1)]
    assert rig.kinds == ["update", "divergence", "held"]
    rig.check()
    rig.learner.metrics = {"kl_step": 0.0}
    await rig.updated(1.0, 0.0)
    assert rig.publisher.versions[rig.publisher.names[NAME]] == 2.0, "the held step is not in it"


class FakeEvaluator:
    """Gives these mean rewards, or raises; `seen`: each version, the live one then, and its policy."""

    def __init__(self, *means: float | Exception) -> None:
        self.key = 1.0
        self.means = iter(means)
        self.seen: list[tuple[AdapterRef, AdapterRef | None, float | None]] = []
        self.rig: Rig

    async def evaluate(self, version: AdapterRef, step: int) -> EvaluationResult:
        self.seen.append((version, self.rig.publisher.live(NAME), self.rig.publisher.versions.get(version)))
        assert self.rig.publisher.kept[version] >= 1, "it is leased"
        mean = next(self.means)
        if isinstance(mean, Exception):
            raise mean
        return EvaluationResult(version, step, mean, mean - 0.1, mean + 0.1, 8, 0, 5.0)


async def evaluated(*means: float | Exception, **settings: object) -> Rig:
    evaluator = FakeEvaluator(*means)
    rig = await opened(evaluator=evaluator, settings=changed(SETTINGS, **settings))
    evaluator.rig = rig
    return rig


async def test_a_version_below_the_floor_never_goes_live() -> None:
    """The version that training starts from is evaluated first, whatever it reaches."""
    rig = await evaluated(0.1, 0.4, RuntimeError("no answer"), 0.5, every=1, eval_floor=0.5)
    assert [(await rig.updated(1.0, 0.0)).status for _ in range(3)] == ["held", "held", "published"]
    assert rig.training.checkpoints.best.ref == ref(3)
    seen = rig.evaluator.seen
    assert seen == [(BASE_ADAPTER, None, None), (ref(1), None, 1.0), (ref(2), None, 1.0), (ref(3), None, 1.0)]
    assert rig.publisher.discarded == [ref(1), ref(2)]
    status = rig.loop.status()
    assert status.skips == {"held_evaluation": 2}
    assert (status.evaluation.adapter, status.evaluation.mean) == (ref(3), 0.5)
    assert status.detail["evaluation_failures"] == 1
    assert rig.kinds.count("evaluation") == 3
    rig.check()


async def test_without_a_floor_the_live_version_is_evaluated_every_k_updates() -> None:
    rig = await evaluated(0.1, 0.3, RuntimeError("no answer"), 0.2, every=2)
    reports = [await rig.updated(1.0, 0.0) for _ in range(6)]
    assert {report.status for report in reports} == {"published"}
    assert [report.metrics.get("eval_mean") for report in reports] == [None, 0.3, None, None, None, 0.2]
    versions = [(version, live) for version, live, _ in rig.evaluator.seen]
    assert versions == [(BASE_ADAPTER, None), (ref(2), ref(2)), (ref(4), ref(4)), (ref(6), ref(6))]
    kinds = [kind for kind in rig.kinds if kind.startswith("evaluation")]
    assert kinds == ["evaluation", "evaluation", "evaluation_failed", "evaluation"]
    assert rig.training.checkpoints.best.ref == ref(2), "the best evaluation, whatever the rewards were"
    rig.check()


async def test_the_best_evaluation_outlives_a_restart_and_is_what_a_rollback_restores() -> None:
    rig = await evaluated(0.1, 0.6, 0.4, 0.5, every=1)
    for _ in range(2):
        await rig.updated(1.0, 0.0)
    await rig.loop.close()
    rig.restart()
    await rig.loop.open()
    assert (rig.loop.status().evaluation.mean, rig.loop.status().best) == (0.4, ref(1))
    await rig.updated(1.0, 0.0)
    assert rig.loop.status().best == ref(1)
    await rig.loop.roll_back(None)
    assert rig.publisher.live(NAME) == ref(1)
    rig.check()


async def test_after_a_rollback_and_a_restart_a_worse_version_is_not_the_best_one() -> None:
    rig = await evaluated(0.1, 0.6, 0.9, 0.5, 0.7, 0.95, every=1)
    await rig.updated(1.0, 0.0, tag="first")
    for _ in range(2):
        await rig.updated(1.0, 0.0)
        await rig.loop.save(None, [], {})
    await rig.loop.roll_back("first")
    rig.restart()
    await rig.loop.open()
    for mean, best in ((0.7, ref(2)), (0.95, ref(5))):
        assert (await rig.updated(1.0, 0.0)).metrics["eval_mean"] == mean
        assert rig.loop.status().best == best
    rig.check()


@pytest.mark.parametrize(
    "error", [AdapterUnavailableError("no slot"), UnknownModelError("unloaded"), RuntimeError("a bug")]
)
async def test_a_flip_that_fails_leaves_policy_and_versions_as_before(error: Exception) -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0)
    rig.publisher.flip_error = error
    group = rig.drawn(1.0, 0.0)
    with pytest.raises(type(error)):
        await rig.loop.update(None)
    assert rig.publisher.discarded == [ref(2)]
    assert [member.reason for member in group.members] == [DropReason.SKIPPED] * 2
    assert rig.loop.status().skips == {"failed": 1}
    rig.check()


@pytest.mark.parametrize("already_live", [False, True])
@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_cancelled_update_is_not_live_afterwards(earlier: int, already_live: bool) -> None:
    """The device stages its version, or has just made it live."""
    rig = await opened()
    for _ in range(earlier):
        await rig.updated(1.0, 0.0)
    live = rig.publisher.live(NAME)
    rig.learner.hold_published, rig.publisher.stages_for_ever = asyncio.Event(), not already_live
    updating = asyncio.create_task(rig.updated(1.0, 0.0))
    await settle()
    new = ref(earlier + 1)
    assert new in rig.publisher.versions
    assert (rig.publisher.live(NAME) == new) is already_live
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert rig.publisher.live(NAME) == live
    assert rig.publisher.discarded == [new], "so it cannot go live any more"
    assert rig.training.versions.staleness(new) is None
    rig.check()


# ---- restarts -----------------------------------------------------------------------------------


async def test_a_live_version_without_a_trainers_state_begins_with_its_weights() -> None:
    async def policy_of(live: AdapterRef):
        assert live == ref(7)
        return policy(7.0, 0)

    rig = Rig(policy_of=policy_of)
    rig.publisher.versions[ref(7)], rig.publisher.names[NAME] = 7.0, ref(7)
    rig.publisher.number_from(NAME, 8)
    rig.publisher.saved.append((CheckpointCard("checkpoint-9", ref(7), 9, "", 0), policy(7.0, 9)))
    rig.publisher.damaged.add("checkpoint-9")
    await rig.loop.open()
    assert rig.learner.policies[NAME] == (7.0, 0)
    assert (await rig.updated(1.0, 0.0)).adapter == ref(8)
    rig.check()


async def test_a_live_version_that_nothing_is_known_of_is_refused() -> None:
    rig = Rig()
    rig.publisher.versions[ref(7)], rig.publisher.names[NAME] = 7.0, ref(7)
    with pytest.raises(ConflictError, match="math@7"):
        await rig.loop.open()
    assert NAME not in rig.learner.policies
