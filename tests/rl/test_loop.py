"""One adapter's updates: what they learn from, what goes live, what is put back."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace

import pytest
from rl.fakes import FakeLearner, FakePublisher, policy, trajectories, value_of

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, CheckpointCard, GivenTrajectory
from mlx_parallm.errors import (
    AdapterUnavailableError,
    ConflictError,
    InvalidRequestError,
    StepFailedError,
    StorageError,
    UnknownModelError,
)
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.gate import Evaluate, Gate
from mlx_parallm.rl.groups import Drop, Group, State
from mlx_parallm.rl.loop import TrainingLoop
from mlx_parallm.rl.settings import LoopSettings, RewardScale
from mlx_parallm.rl.trainee import PolicyOf, Trainee, TraineeParts

NAME = "math"
SETTINGS = LoopSettings(update_frequency=4, scale_rewards=RewardScale.NONE, checkpoint_interval=1000)


def ref(version: int) -> AdapterRef:
    return AdapterRef(NAME, version)


@dataclass
class Rig:
    """A loop over fakes, and every event it emitted."""

    settings: LoopSettings = SETTINGS
    evaluate: Evaluate | None = None
    serves_base: bool = True
    imitation: bool = False
    policy_of: PolicyOf | None = None
    learner: FakeLearner = field(default_factory=FakeLearner)
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    publisher: FakePublisher = field(init=False)
    groups: int = 0

    def __post_init__(self) -> None:
        self.publisher = FakePublisher(self.learner)
        self.restart()

    def restart(self) -> None:
        """The process ends, whenever; what is on disk and live stays."""
        self.buffer = TrajectoryBuffer(self.settings.buffer_size)
        gate = Gate(self.settings.kl_bound, self.evaluate)
        parts = TraineeParts(self.learner, self.publisher, gate, self.settings, self.emit, self.policy_of)
        self.trainee = Trainee(NAME, parts, self.serves_base)
        self.loop = TrainingLoop(self.trainee, self.buffer, self.settings, self.emit, self.imitation)

    def emit(self, kind: str, **data: object) -> None:
        self.events.append((kind, data))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def drawn(self, *rewards: float, by: AdapterRef | None = None, scorer: str | None = "exact") -> Group:
        """A complete group, of the last version."""
        self.groups += 1
        drawn_by = by or self.trainee.lineage.tip
        group = Group.of(NAME, trajectories(f"g{self.groups}", drawn_by, len(rewards), scorer))
        self.buffer.add(group)
        self.buffer.score(group, rewards)
        self.loop.wake()
        return group

    def check(self) -> None:
        """Nothing is taken, and learner, live version and books tell the same."""
        self.buffer.check_integrity()
        assert self.loop.status().state != "updating"
        if (live := self.publisher.live(NAME)) is not None and not self.trainee.drifted:
            assert self.publisher.versions[live] == self.learner.policies[NAME][0]
        assert self.trainee.reports.step == self.learner.policies[NAME][1]

    async def updated(self, *rewards: float, **options: object):
        """One update of one group of these rewards."""
        self.drawn(*rewards)
        return await self.loop.update(None, **options)


async def opened(**fields: object) -> Rig:
    rig = Rig(**fields)
    await rig.loop.open()
    rig.events.clear()
    return rig


async def settle(turns: int = 50) -> None:
    """Lets every task run until it waits for something that will not come."""
    for _ in range(turns):
        await asyncio.sleep(0)


class running:  # noqa: N801 - reads as a statement
    """The loop runs by itself while the block does."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def __aenter__(self) -> None:
        self.task = asyncio.create_task(self.rig.loop.run())
        await settle()

    async def __aexit__(self, *_: object) -> None:
        await settle()
        assert not self.task.done()
        self.task.cancel()


# ---- what is learnt from ------------------------------------------------------------------------


async def test_an_update_begins_when_complete_groups_hold_enough_trajectories() -> None:
    rig = await opened()
    async with running(rig):
        first = rig.drawn(1.0, 0.0, 0.5)
        await settle()
        assert rig.learner.batches == []
        second = rig.drawn(1.0, 0.0, by=BASE_ADAPTER)
        await settle()
        assert len(rig.learner.batches) == 1
    batch = rig.learner.batches[0]
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5, 0.0, 0.5, -0.5]
    assert [sample.group for sample in batch.samples] == [0, 0, 0, 1, 1]
    assert [s.completion_ids for s in batch.samples[:2]] == [m.trajectory.completion_ids for m in first.members[:2]]
    assert batch.samples[0].sampling_logprobs == (-0.5, -1.0)
    assert batch.metrics["reward_mean"] == 0.5
    assert batch.metrics["reward_std"] == pytest.approx(math.sqrt((0.25 * 4) / 5))
    assert {member.state for group in (first, second) for member in group.members} == {State.TRAINED}
    assert rig.publisher.live(NAME) == ref(1) == rig.trainee.lineage.tip
    assert rig.publisher.versions[ref(1)] == 1.0
    assert rig.kinds == ["update"]
    assert rig.events[0][1]["version"] == "math@1"
    rig.check()


async def test_a_batch_takes_the_oldest_groups_and_leaves_the_rest() -> None:
    rig = await opened(settings=replace(SETTINGS, max_staleness=2))
    async with running(rig):
        rig.learner.hold = asyncio.Event()
        for _ in range(5):
            rig.drawn(1.0, 0.0)
        await settle()
        assert rig.loop.status().state == "updating"
        rig.learner.hold.set()
    assert [len(batch.samples) for batch in rig.learner.batches] == [4, 4]
    assert rig.buffer.trained[NAME] == 8
    assert rig.buffer.waiting(NAME) == 2
    rig.check()


async def test_staleness_is_bounded_counted_and_told_to_the_trainer() -> None:
    rig = await opened(settings=replace(SETTINGS, max_staleness=1))
    old = [rig.drawn(1.0, 0.0, by=BASE_ADAPTER) for _ in range(4)]
    unscored = Group.of(NAME, trajectories("late", BASE_ADAPTER))
    rig.buffer.add(unscored)
    async with running(rig):
        pass
    # two groups were on-policy, two were one version old by then, and the unscored one came to be two
    assert [batch.samples[0].on_policy for batch in rig.learner.batches] == [True, False]
    assert [batch.metrics["staleness"] for batch in rig.learner.batches] == [0.0, 1.0]
    assert [group.members[0].state for group in old] == [State.TRAINED] * 4
    assert [member.reason for member in unscored.members] == [Drop.STALE] * 2
    assert rig.buffer.drops[NAME] == {Drop.STALE: 2}
    assert rig.loop.judge(BASE_ADAPTER) is Drop.STALE
    assert rig.loop.judge(ref(1)) is None
    assert rig.loop.judge(ref(9)) is Drop.FOREIGN


async def test_groups_without_a_signal_are_dropped_and_the_others_learnt_from() -> None:
    rig = await opened()
    flat, good = rig.drawn(1.0, 1.0), rig.drawn(1.0, 0.0)
    report = await rig.loop.update(None)
    assert report.status == "published"
    assert len(rig.learner.batches[0].samples) == 2
    assert rig.learner.batches[0].metrics["reward_mean"] == 0.75
    assert [member.reason for member in flat.members] == [Drop.ZERO_VARIANCE] * 2
    assert good.members[0].state is State.TRAINED
    assert rig.loop.status().drops == {"zero_variance": 2}


async def test_an_update_without_any_signal_teaches_nothing_and_never_pauses() -> None:
    rig = await opened(settings=replace(SETTINGS, max_skips=1))
    for _ in range(3):
        report = await rig.updated(1.0, 1.0)
        assert (report.status, report.reason) == ("skipped", "no_signal")
    assert (await rig.loop.update(None)).reason == "no_trajectories"
    assert rig.learner.batches == []
    assert rig.loop.status().skips == {"no_signal": 3, "no_trajectories": 1}
    assert rig.loop.status().state == "idle"
    rig.check()


async def test_single_samples_are_compared_with_their_scorers_past() -> None:
    rig = await opened()
    singles = [rig.drawn(reward, scorer=scorer) for reward, scorer in ((1.0, None), (5.0, "exact"), (0.0, None))]
    assert (await rig.loop.update(None)).status == "published"
    assert [sample.advantage for sample in rig.learner.batches[0].samples] == [-1.0]
    assert [group.members[0].reason for group in singles] == [Drop.SINGLE, Drop.SINGLE, None]
    rig.drawn(2.0, scorer=None)
    rig.drawn(5.0, scorer="exact")
    await rig.loop.update(None)
    assert [sample.advantage for sample in rig.learner.batches[1].samples] == [1.5]
    assert rig.buffer.drops[NAME] == {Drop.SINGLE: 2, Drop.ZERO_VARIANCE: 1}


async def test_imitation_learns_from_everything() -> None:
    rig = await opened(imitation=True)
    assert (await rig.updated(1.0, 1.0)).status == "published"
    assert len(rig.learner.batches[0].samples) == 2
    given = [GivenTrajectory((1,), (2, 3))]
    assert (await rig.loop.update(given)).status == "published"
    assert rig.learner.batches[1].samples[0].completion_ids == (2, 3)
    assert rig.trainee.memory.mean is None


async def test_given_trajectories_are_grouped_by_id_or_else_by_prompt() -> None:
    rig = await opened()
    given = [
        GivenTrajectory((1,), (2,), 1.0, "a", (-0.5,)),
        GivenTrajectory((9,), (4,), 4.0),
        GivenTrajectory((1,), (3,), 0.0, "a"),
        GivenTrajectory((9,), (5,), 2.0, temperature=0.5),
        GivenTrajectory((8,), (5,), 2.0),
    ]
    report = await rig.loop.update(given)
    samples = rig.learner.batches[0].samples
    assert [(s.completion_ids, s.group, s.advantage) for s in samples] == [
        ((2,), 0, 0.5), ((3,), 0, -0.5), ((4,), 1, 1.0), ((5,), 1, -1.0)]  # fmt: skip
    assert [s.on_policy for s in samples] == [False, True, True, True]
    assert [s.temperature for s in samples] == [1.0, 1.0, 1.0, 0.5]
    assert (report.status, report.adapter, report.step) == ("published", ref(1), 1)
    assert rig.buffer.collected == {}


@pytest.mark.parametrize(
    "bad",
    [
        GivenTrajectory((), (2,)),
        GivenTrajectory((1,), ()),
        GivenTrajectory((1,), (2,), math.nan),
        GivenTrajectory((1,), (2,), temperature=0.0),
        GivenTrajectory((1,), (2, 3), sampling_logprobs=(-0.5,)),
        GivenTrajectory((1,), (2,), sampling_logprobs=(-math.inf,)),
    ],
)
async def test_trajectories_that_cannot_be_learnt_from_are_refused_by_number(bad: GivenTrajectory) -> None:
    rig = await opened()
    with pytest.raises(InvalidRequestError, match=r"trajectories\[1\]"):
        await rig.loop.update([GivenTrajectory((1,), (2,)), bad])
    assert rig.learner.batches == []


# ---- what goes live -----------------------------------------------------------------------------


async def test_an_update_that_is_not_published_is_in_the_next_one_that_is() -> None:
    rig = await opened()
    report = await rig.updated(1.0, 0.0, publish=False)
    assert (report.status, report.adapter, report.step) == ("trained", None, 1)
    assert rig.publisher.versions == {}
    assert rig.trainee.lineage.tip == BASE_ADAPTER
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
        (replace(SETTINGS, kl_bound=0.1), {"kl_step": 0.11}, "held_kl_bound"),
        (replace(SETTINGS, kl_bound=0.1), {}, "held_kl_bound"),
    ],
)
async def test_a_held_update_leaves_policy_and_versions_as_before(
    settings: LoopSettings, metrics: dict[str, float], code: str
) -> None:
    rig = await opened(settings=settings)
    rig.learner.metrics = {"loss": 0.5, "kl_step": 0.1}
    assert (await rig.updated(1.0, 0.0)).status == "published"
    rig.learner.metrics = metrics
    group = rig.drawn(1.0, 0.0)
    report = await rig.loop.update(None)
    assert (report.status, report.adapter, report.step) == ("held", ref(1), 1)
    assert all(map(math.isfinite, report.metrics.values()))
    assert [member.reason for member in group.members] == [Drop.HELD] * 2
    assert rig.loop.status().skips == {code: 1}
    assert list(rig.publisher.versions) == [ref(1)]
    assert rig.kinds == ["update", "held"]
    rig.check()
    rig.learner.metrics = {"kl_step": 0.0}
    await rig.updated(1.0, 0.0)
    assert rig.publisher.versions[rig.publisher.names[NAME]] == 2.0, "the held step is not in it"


async def test_the_evaluation_sees_the_version_before_it_is_live() -> None:
    seen: list[tuple[AdapterRef, AdapterRef | None, float]] = []
    verdicts = iter([False, RuntimeError("no answer"), True])

    async def evaluate(staged: AdapterRef) -> bool:
        seen.append((staged, rig.publisher.live(NAME), rig.publisher.versions[staged]))
        verdict = next(verdicts)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    rig = await opened(evaluate=evaluate)
    assert [(await rig.updated(1.0, 0.0)).status for _ in range(3)] == ["held", "held", "published"]
    assert seen == [(ref(1), None, 1.0), (ref(2), None, 1.0), (ref(3), None, 1.0)]
    assert rig.publisher.discarded == [ref(1), ref(2)]
    assert rig.loop.status().skips == {"held_evaluation": 2}
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
    assert [member.reason for member in group.members] == [Drop.SKIPPED] * 2
    assert rig.loop.status().skips == {"failed": 1}
    rig.check()


async def test_a_policy_that_could_not_be_put_back_is_before_it_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await opened()
    rig.learner.metrics = {"loss": math.nan}
    with monkeypatch.context() as patched:
        patched.setattr(rig.learner, "restore", _raises)
        assert (await rig.updated(1.0, 0.0)).status == "held"
        assert rig.learner.policies[NAME] == (1.0, 1)
        with pytest.raises(StepFailedError):
            await rig.updated(1.0, 0.0)
    rig.learner.metrics = {}
    assert (await rig.updated(1.0, 0.0)).step == 1
    assert rig.publisher.versions[ref(1)] == 1.0
    rig.check()


async def _raises(*_: object) -> None:
    raise StepFailedError("the device is busy dying")


# ---- pauses -------------------------------------------------------------------------------------


async def test_training_pauses_after_so_many_skips_in_a_row_and_resumes_when_asked() -> None:
    rig = await opened(settings=replace(SETTINGS, max_skips=2, update_frequency=2))
    async with running(rig):
        rig.learner.skip = "loss_not_finite"
        rig.drawn(1.0, 0.0)
        await settle()
        rig.learner.skip = ""
        rig.drawn(1.0, 0.0)
        await settle()
        assert rig.loop.status().state == "idle", "an update between them breaks the row"
        rig.learner.skip = "gradient_not_finite"
        bad = [rig.drawn(1.0, 0.0) for _ in range(3)]
        await settle()
        status = rig.loop.status()
        assert status.state == "paused"
        assert status.skips == {"loss_not_finite": 1, "gradient_not_finite": 2}
        assert "gradient_not_finite" in str(status.detail["pause_reason"])
        assert [group.members[0].state for group in bad] == [State.DROPPED, State.DROPPED, State.SCORED]
        assert rig.kinds[-1] == "paused"
        rig.learner.skip = ""
        rig.loop.wake()
        await settle()
        assert len(rig.learner.batches) == 4
        rig.loop.resume()
        await settle()
        assert rig.kinds[-2:] == ["resumed", "update"]
    assert bad[2].members[0].state is State.TRAINED
    rig.check()


async def test_faults_of_the_device_pause_training_and_kill_nothing() -> None:
    rig = await opened(settings=replace(SETTINGS, max_skips=2, update_frequency=2))
    async with running(rig):
        rig.learner.error = StepFailedError("out of memory")
        for _ in range(3):
            rig.drawn(1.0, 0.0)
        await settle()
        assert rig.loop.status().state == "paused"
        assert rig.loop.status().skips == {"failed": 2}
        rig.learner.error = None
        rig.loop.resume()
    assert rig.publisher.versions[ref(1)] == 1.0
    rig.check()


async def test_a_paused_loop_updates_on_request_only() -> None:
    rig = await opened(settings=replace(SETTINGS, update_frequency=2))
    async with running(rig):
        rig.loop.pause()
        rig.loop.pause()
        rig.drawn(1.0, 0.0)
        await settle()
        assert rig.learner.batches == []
        assert rig.loop.status().state == "paused"
        assert (await rig.loop.update(None)).status == "published"
        rig.loop.resume()
        rig.loop.resume()
    assert rig.kinds == ["paused", "update", "resumed"]


async def test_updates_asked_for_and_automatic_ones_take_turns() -> None:
    rig = await opened(settings=replace(SETTINGS, update_frequency=2))
    async with running(rig):
        rig.learner.hold = asyncio.Event()
        for _ in range(3):
            rig.drawn(1.0, 0.0)
        await settle()
        given = [GivenTrajectory((1,), (2,), 1.0), GivenTrajectory((1,), (3,), 0.0)]
        asked = [asyncio.create_task(rig.loop.update(given)) for _ in range(2)]
        asked.append(asyncio.create_task(rig.loop.update(None)))
        await settle()
        rig.learner.hold.set()
        reports = await asyncio.gather(*asked)
    versions = [ref(number) for number in range(1, len(rig.learner.batches) + 1)]
    assert rig.publisher.flips == versions
    assert [report.status for report in reports[:2]] == ["published", "published"]
    assert rig.buffer.trained[NAME] + rig.buffer.drops[NAME].total() == 6, "each trajectory has one fate"
    rig.check()


# ---- checkpoints --------------------------------------------------------------------------------


def saves(rig: Rig) -> list[tuple[str, AdapterRef, tuple[str, ...]]]:
    return [(card.name, card.adapter, card.tags) for card, _ in rig.publisher.saved]


async def test_every_few_updates_are_saved_and_the_best_version_before_them() -> None:
    rig = await opened(settings=replace(SETTINGS, checkpoint_interval=2))
    for mean in (0.25, 0.5, 0.4, 0.3):
        await rig.updated(mean + 0.25, mean - 0.25)
    # the running mean is best at the second batch, which version 1 drew, and again at the third
    assert saves(rig) == [
        ("checkpoint-1", ref(1), ("best",)),
        ("checkpoint-2", ref(2), ()),
        ("checkpoint-2", ref(2), ("best",)),
        ("checkpoint-4", ref(4), ()),
    ]
    for _ in range(2):
        await rig.updated(0.2, 0.0)
    assert saves(rig)[4:] == [("checkpoint-6", ref(6), ())], "the best one is saved once"
    assert rig.publisher.saved[0][0].metrics["reward_running_mean"] == pytest.approx(0.3)
    two_updates = ["update", "update", "checkpoint", "checkpoint"]
    assert rig.kinds == [*two_updates, *two_updates, "update", "update", "checkpoint"]


async def test_a_named_checkpoint_is_saved_at_once_published_or_not() -> None:
    rig = await opened()
    report = await rig.updated(1.0, 0.0, tag="good")
    assert report.checkpoint == "checkpoint-1"
    report = await rig.updated(1.0, 0.0, publish=False, tag="draft")
    assert (report.status, report.adapter, report.checkpoint) == ("trained", ref(1), "checkpoint-2")
    assert ("checkpoint-2", ref(2), ("draft",)) in saves(rig)
    assert rig.publisher.discarded == [ref(2)]
    assert value_of(rig.publisher.saved[-1][1]) == 2.0


async def test_a_checkpoint_on_request_holds_the_policy_and_its_optimizer() -> None:
    rig = await opened()
    with pytest.raises(ConflictError, match="equal to the base"):
        await rig.loop.save(None, [], {})
    await rig.updated(1.0, 0.0)
    card = await rig.loop.save(None, ["good"], {"mine": 2.0})
    assert (card.name, card.adapter, card.tags) == ("checkpoint-1", ref(1), ("good",))
    assert card.metrics == {"mine": 2.0, **rig.trainee.memory.to_metrics()}
    assert rig.publisher.saved[-1][1] == policy(1.0, 1)
    assert (await rig.loop.save(70, [], {})).name == "checkpoint-70"
    await rig.updated(1.0, 0.0)
    with pytest.raises(ConflictError):
        await rig.loop.save(70, [], {})
    rig.publisher.no_folder = True
    with pytest.raises(InvalidRequestError, match="--checkpoint-dir"):
        await rig.loop.save(None, [], {})
    rig.check()


async def test_a_policy_that_is_not_published_is_saved_as_a_version_of_its_own() -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0)
    await rig.updated(1.0, 0.0, publish=False)
    card = await rig.loop.save(None, [], {})
    assert (card.adapter, rig.publisher.saved[-1][1]) == (ref(2), policy(2.0, 2))
    assert rig.publisher.names[NAME] == ref(1) == rig.trainee.lineage.tip
    rig.check()


async def test_a_save_waits_for_the_update_that_is_under_way() -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0)
    rig.learner.hold = asyncio.Event()
    updating = asyncio.create_task(rig.updated(1.0, 0.0))
    await settle()
    saving = asyncio.create_task(rig.loop.save(None, [], {}))
    await settle()
    assert not saving.done()
    rig.learner.hold.set()
    await updating
    assert (await saving).adapter == ref(2)


async def test_a_checkpoint_that_cannot_be_saved_costs_only_itself() -> None:
    rig = await opened(settings=replace(SETTINGS, checkpoint_interval=1))
    rig.publisher.save_error = StorageError("the disk is full")
    report = await rig.updated(1.0, 0.0)
    assert (report.status, report.checkpoint) == ("published", None)
    assert rig.loop.status().detail["checkpoint_failures"] == 1
    rig.check()


# ---- rollback -----------------------------------------------------------------------------------


async def test_training_goes_back_to_the_best_version_when_rewards_fall() -> None:
    rig = await opened(settings=replace(SETTINGS, rollback_drop=0.3, checkpoint_interval=3, max_staleness=9))
    for mean in (0.5, 0.6, 0.9):  # drawn by the base, versions 1 and 2
        await rig.updated(mean + 0.1, mean - 0.1)
    assert rig.loop.status().best == ref(2)
    assert +rig.publisher.kept == {ref(2): 1}, "and no earlier one"
    assert rig.publisher.names[NAME] == ref(3)
    foreign, ours = (Group.of(NAME, trajectories(name, by)) for name, by in (("foreign", ref(3)), ("ours", ref(2))))
    rig.buffer.add(foreign)
    rig.buffer.add(ours)
    # the running mean falls from 0.596 to 0.477, 0.381 and 0.305; and then below 0.296
    reports = [await rig.updated(0.1, -0.1) for _ in range(4)]
    assert [report.status for report in reports] == ["published"] * 3 + ["skipped"]
    assert reports[-1].adapter == ref(2)
    assert "rolled_back" in rig.loop.status().skips
    assert rig.publisher.names[NAME] == ref(2) == rig.trainee.lineage.tip
    assert rig.learner.policies[NAME] == (2.0, 2)
    assert [member.reason for member in foreign.members] == [Drop.FOREIGN] * 2
    assert [member.state for member in ours.members] == [State.WAITING] * 2
    assert rig.trainee.memory.mean is None
    assert rig.kinds.count("rollback") == 1
    rollback = rig.kinds.index("rollback")
    assert rig.events[rollback][1]["version"] == "math@2"
    assert saves(rig)[-1][1:] == (ref(2), ("best",))
    assert rig.publisher.latest == "checkpoint-2", "a restart begins with it"
    rig.check()
    report = await rig.updated(0.1, -0.1)
    assert (report.status, report.step) == ("published", 3), "low rewards are a new beginning, not another fall"
    assert rig.publisher.versions[report.adapter] == 3.0
    rig.check()


async def test_rewards_that_never_rose_bring_back_the_base() -> None:
    rig = await opened(settings=replace(SETTINGS, rollback_drop=0.05))
    await rig.updated(0.6, 0.4)
    assert rig.loop.status().best == BASE_ADAPTER
    report = await rig.updated(0.1, -0.1)
    assert report.status == "skipped"
    assert rig.publisher.names[NAME] == report.adapter == ref(2)
    assert rig.publisher.versions[ref(2)] == 0.0
    assert rig.learner.policies[NAME] == (0.0, 0)
    assert rig.trainee.lineage.lag(BASE_ADAPTER) == 1
    assert rig.trainee.lineage.lag(ref(1)) is None
    rig.check()


async def test_rollback_on_request_to_the_best_or_a_checkpoint() -> None:
    rig = await opened()
    with pytest.raises(ConflictError, match="best"):
        await rig.loop.roll_back(None)
    await rig.updated(1.0, 0.0, tag="first")
    await rig.updated(1.2, 0.8)
    await rig.updated(0.5, 0.0)
    with pytest.raises(UnknownModelError):
        await rig.loop.roll_back("nothing")
    assert rig.publisher.names[NAME] == ref(3)
    await rig.loop.roll_back("first")
    assert rig.publisher.names[NAME] == ref(1)
    assert rig.learner.policies[NAME] == (1.0, 1)
    assert rig.publisher.latest == "checkpoint-1"
    rig.check()
    await rig.updated(0.5, 0.0, tag="second")
    assert rig.publisher.latest == "checkpoint-2"
    await rig.loop.roll_back("checkpoint-1")
    assert rig.trainee.lineage.newest(9) == ("base@0", "math@1")
    assert rig.publisher.latest == "checkpoint-1"
    rig.check()


async def test_a_rollback_that_fails_leaves_everything_as_it_was() -> None:
    rig = await opened()
    await rig.updated(1.0, 0.0, tag="first")
    await rig.updated(1.0, 0.0)
    rig.publisher.flip_error = AdapterUnavailableError("gone")
    with pytest.raises(AdapterUnavailableError):
        await rig.loop.roll_back("first")
    assert rig.publisher.names[NAME] == ref(2) == rig.trainee.lineage.tip
    assert "rollback" not in rig.kinds
    rig.check()


# ---- restarts -----------------------------------------------------------------------------------


async def test_a_restart_goes_on_from_the_checkpoint_as_if_nothing_had_happened() -> None:
    rig = await opened(settings=replace(SETTINGS, checkpoint_interval=2, rollback_drop=0.3))
    rig.drawn(0.25, scorer=None)
    for mean in (0.25, 0.5):
        await rig.updated(mean + 0.25, mean - 0.25)
    assert saves(rig)[-1] == ("checkpoint-2", ref(2), ())

    async def third() -> tuple[object, ...]:
        rig.drawn(0.75, scorer=None)
        report = await rig.updated(1.0, 0.5)
        return rig.learner.batches[-1], report.step, rig.trainee.memory.mean, rig.trainee.memory.best

    went_on = await third()
    rig.publisher.names[NAME] = ref(2)  # what a restarted server serves
    rig.restart()
    await rig.loop.open()
    assert rig.events[-1] == ("started", {"adapter": NAME, "version": "math@2", "step": 2})
    assert rig.loop.status().best == ref(1)
    assert rig.loop.judge(BASE_ADAPTER) is Drop.FOREIGN
    assert rig.loop.judge(ref(2)) is None
    assert await third() == went_on
    rig.check()


async def test_a_live_version_without_a_trainers_state_begins_with_its_weights() -> None:
    async def policy_of(live: AdapterRef):
        assert live == ref(7)
        return policy(7.0, 0)

    rig = Rig(policy_of=policy_of)
    rig.publisher.versions[ref(7)], rig.publisher.names[NAME] = 7.0, ref(7)
    rig.publisher._next[NAME] = 7
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


async def test_an_adapter_that_the_base_does_not_stand_for_gets_a_version_at_once() -> None:
    rig = await opened(serves_base=False)
    assert rig.publisher.names[NAME] == ref(1)
    assert rig.publisher.versions[ref(1)] == 0.0
    assert (await rig.updated(1.0, 0.0)).adapter == ref(2)
    rig.check()


async def test_a_version_that_was_unloaded_cannot_be_the_best_and_stops_nothing() -> None:
    rig = await opened()
    await rig.updated(0.5, 0.0)
    del rig.publisher.versions[ref(1)]
    assert (await rig.updated(1.0, 0.5)).status == "published"
    assert rig.loop.status().best == BASE_ADAPTER
