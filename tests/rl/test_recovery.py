"""What a crash leaves of a policy, of its trajectories and of its rewards, with stand-ins for the learner and the disk.

A learner here adds up what it is given, so that equal policies were made by equal updates in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path

import pytest
from configs import changed, limited, loss_config
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rl.fakes import FakeEngine, FakeLearner
from rl.service_rig import GIVEN, SETTINGS, World, settle, until

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.config import Action, Algorithm, CheckpointingConfig, ResolvedTraining, RewardScale
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.core.requests import (
    CollectionSpec,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ConfigError, ConflictError, EngineError, StorageError
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import PolicyChange, Rollback, Start, Update
from mlx_parallm.rl.runs.replay import StartPoint, plan
from mlx_parallm.rl.runs.store import JournalFile, Statements
from mlx_parallm.rl.status import EvaluationResult, TrainingEvent
from mlx_parallm.rl.teachers import Teacher
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.train.data import UpdateBatch

MANUAL = limited(changed(SETTINGS, update_frequency=1000), reward=None)
NEVER = CheckpointingConfig(interval=10_000, minutes=10_000.0)


# ---- the plan -----------------------------------------------------------------------------------


def changes(*bodies: Start | Rollback | Update) -> list[PolicyChange]:
    return [PolicyChange("main", number, 0.0, body) for number, body in enumerate(bodies, 1)]


def update(step: int, **progress: float) -> Update:
    return Update((), None, True, step, "published", step, {}, progress)


def numbers(found: tuple[PolicyChange, ...]) -> list[int]:
    return [change.number for change in found]


def test_what_started_from_something_that_is_gone_is_lost_and_counted() -> None:
    made = changes(Start(), update(1), Start("main@7"), update(2), update(3))
    found = plan(made, StartPoint("main@1", "checkpoint-1", 2))
    assert (found.updates, found.lost, found.is_new, found.last) == ((), 2, True, 5)
    assert numbers(plan(made, StartPoint("main@7")).updates) == [4, 5]
    assert plan(changes(Start(), update(1), Rollback(), update(2)), StartPoint("main@1", "checkpoint-1", 2)).lost == 1


def test_a_rollback_is_not_made_again_over_a_version_that_was_loaded_since() -> None:
    made = changes(Start(), update(1), update(2), Rollback("checkpoint-1", ("base@0", "main@1")), update(5))
    found = plan(made, StartPoint("main@9"))
    assert (found.roll_back_to, found.updates, found.lost, found.is_new, found.last) == ("", (), 3, True, 5)
    assert plan(made, StartPoint("main@5")).roll_back_to == "checkpoint-1", "its own version, whose checkpoint is gone"


# ---- a service that crashes ----------------------------------------------------------------------


class Adding(FakeLearner):
    """Each update makes of the policy a number that depends on all updates so far, and on their order."""

    first_metrics: Mapping[str, float] = {"loss": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.metrics = dict(self.first_metrics)

    async def _learnt(self, name: str, batch: UpdateBatch):
        value = self.policies[name][0]
        outcome = await super()._learnt(name, batch)
        if not outcome.skipped:
            told = batch.step_scale * sum(
                sample.loss_scale * sum(sample.advantages) * sum(sample.token_ids) for sample in batch.samples
            )
            taught = batch.step_scale * sum(sum(sample.teacher_logprobs) for sample in batch.samples)
            self.policies[name] = (value / 2 + 1 + (told + taught) / 1000, outcome.step)
        return outcome


class Run:
    """A run on the disk at `path`. Each `process` is a service that ends without a word; checkpoints survive it."""

    def __init__(self, path: Path, training: ResolvedTraining = MANUAL, keeps: CheckpointingConfig = NEVER) -> None:
        self.path, self.training, self.keeps = path, training, keeps
        self.keep = 1000  # changes that the journal keeps although a checkpoint covers them
        self.evaluator: object = None
        self.teacher: Teacher | None = None
        self.saved: list[object] = []
        self.reward_key = 0.0
        self.requests = self.group = 0

    @asynccontextmanager
    async def process(self, scores: bool = True) -> AsyncIterator[World]:
        journal = Journal(JournalFile(self.path), self.keep)
        others = (self.evaluator, self.teacher, self.reward_key)
        one = World(self.training, None, self.keeps, journal, Adding(), *others)
        one.requests = self.requests
        one.publisher.saved = [*self.saved]
        if one.publisher.saved:
            card, held = next(pair for pair in reversed(one.publisher.saved) if pair[0].adapter.name == "main")
            one.publisher.restored(card.adapter, held)
        if not scores:
            one.scorers.gate = asyncio.Event()
        await one.service.start_adapter("main")
        try:
            yield one
            await one.service.parts.journal.flush()  # what has been acknowledged is on the disk; nothing else is done
        finally:
            self.requests, self.saved = one.requests, one.publisher.saved
            if self.keep == 0:
                self.saved = [pair for pair in self.saved if pair[0].tags or pair is self.saved[-1]]
            for task in tuple(one.service.changes._tasks):
                task.cancel()
            await one.service.trajectories.close()


async def finished_update(one: World):
    await settle()
    return await one.service.update()


async def test_what_waited_waits_again_with_its_rewards(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        scored, silent = await one.request(), await one.request(scorer=None)
        await settle()
        one.scorers.gate = asyncio.Event()
        unscored = await one.request()
        await one.service.trajectories.feedback(silent[1], 0.5)
        before = one.states()
        assert [before[ids] for ids in (scored[0], silent[0], silent[1], unscored[0])] == [
            *("scored", "waiting", "scored", "waiting"),
        ]
    async with run.process(scores=False) as one:
        assert one.states() == before
        rewards = {each.trajectory_id: member.reward for each, member in one.service.trajectories.buffer.newest(99)}
        assert (rewards[scored[0]], rewards[scored[1]], rewards[silent[1]]) == (1.0, 0.0, 0.5)
        one.scorers.gate.set()
        await until(lambda: one.states()[unscored[1]] == "scored")
        report = await one.service.update()
        assert (report.status, report.metrics["trajectories"]) == ("published", 5.0)
        with pytest.raises(ConflictError):
            await one.service.trajectories.feedback(scored[0], 1.0)
    async with run.process() as one:
        assert one.states() == {silent[0]: "waiting"}, "nothing is trained on twice"
        assert one.service.status().current == AdapterRef("main", 1)


async def test_what_the_first_version_has_answered_waits_again_after_a_later_one_was_saved(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await one.service.start("tone")
        ids = await one.request(AdapterRef("tone", 1), scorer=None)
        await one.service.update("tone", given=GIVEN)
        for adapter in ("main", "tone"):
            await one.service.save(adapter, None, (), {})
    async with run.process() as one:
        one.publisher.restored(AdapterRef("tone", 2), run.saved[-1][1])
        await one.service.start("tone")
        assert one.states() == dict.fromkeys(ids, "waiting")


@pytest.mark.parametrize("of_hook", [False, True])
async def test_a_start_that_fails_is_as_none_and_the_next_one_has_all_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_hook: bool
) -> None:
    tone, errors = AdapterRef("tone", 1), [ConfigError("the journal cannot be read")]
    run = Run(tmp_path / "journal.sqlite", changed(MANUAL, update_frequency=4))
    async with run.process() as one:
        await one.service.start("tone")
        ids = await one.request(tone, scorer=None)
        await one.service.trajectories.feedback(ids[0], 0.5)
        for adapter in ("main", "tone"):
            await one.service.save(adapter, None, (), {})

    waiting = JournalFile.waiting

    def read(file: JournalFile, adapter: str):
        if errors and not of_hook:
            raise errors.pop()
        return waiting(file, adapter)

    async def take(_: object) -> None:
        if errors:
            raise errors.pop()

    async with run.process() as one:
        one.publisher.restored(tone, run.saved[-1][1])
        events: list[TrainingEvent] = []
        one.service.add_sink(events.append)
        one.service.hooks.too_late.append(take)
        monkeypatch.setattr(JournalFile, "waiting", read)
        with pytest.raises(ConfigError, match="cannot be read"):
            await one.service.start("tone")
        assert (one.service.status().trained, one.states()) == (("main",), {})
        assert "tone" not in one.learner.policies, "its memory is free again"
        assert [event.kind for event in events if event.data["adapter"] == "tone"][-1] == "stopped"
        with pytest.raises(ConflictError, match="not trained here"):
            await one.service.trajectories.check(CollectionSpec("exact"), tone, EVERYTHING)
        one.service.check_integrity()
        await one.service.start("tone")
        assert one.states() == {ids[0]: "scored", ids[1]: "waiting"}
        await one.request(tone)
        await one.service.trajectories.feedback(ids[1], 0.25)
        await until(lambda: one.service.status("tone").updates_total == 1)
        assert (await one.service.stop("tone")).state == "stopped"
        assert one.service.status().trained == ("main",)
        one.service.check_integrity()


def watched(value: float) -> dict[str, float]:
    return {"loss": 0.5, "entropy": value, "reward_mean": 0.5}


async def test_an_accepted_update_is_made_again_whatever_is_a_divergence_by_now(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        one.learner.metrics = {"loss": 0.5, "kl_step": 1.5}
        await one.service.update(given=GIVEN)
        policy = one.learner.policies["main"]
    run.training = limited(MANUAL, kl_step=1.1)
    async with run.process() as one:
        one.learner.metrics = {"loss": 0.5, "kl_step": 1.5}
        assert one.learner.policies["main"] == policy
        assert one.service.status().diverged == {}
        assert (await one.service.update(given=GIVEN)).status == "held"


async def test_an_update_is_made_again_with_the_settings_that_it_was_made_with(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", changed(MANUAL, minibatches=2))
    async with run.process() as one:
        await one.request()
        await finished_update(one)
        policy = one.learner.policies["main"]
    run.training = changed(MANUAL, scale_rewards=RewardScale.GROUP, minibatches=1)
    async with run.process() as one:
        assert one.learner.policies["main"] == policy
        (batch,) = one.learner.batches
        assert (batch.settings.minibatches, batch.loss.scale_rewards) == (2, RewardScale.NONE)
        await one.service.update(given=GIVEN)
        assert one.learner.batches[-1].settings is None, "later ones have the present settings"


@pytest.mark.parametrize("saves", [0, 2, 4])
async def test_after_a_crash_updates_are_compared_with_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    """Whether these are in a checkpoint or are made again."""
    monkeypatch.setattr(Adding, "first_metrics", watched(2.0))
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        for number in range(4):
            await one.service.update(given=GIVEN)
            if number + 1 == saves:
                await one.service.save(None, None, [], {})
    async with run.process() as one:
        one.learner.metrics = {**watched(0.01), "reward_mean": 0.1}
        (found,) = (await one.service.update(given=GIVEN)).divergences
        assert found.signal == "entropy"


async def test_after_a_crash_updates_are_not_compared_with_those_that_a_rollback_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart begins with a later checkpoint than the one of the rollback."""
    monkeypatch.setattr(Adding, "first_metrics", watched(2.0))
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await one.service.update(given=GIVEN, checkpoint_name="first")
        for _ in range(4):
            await one.service.update(given=GIVEN)
        await one.service.save(None, None, [], {})
        await one.service.rollback(to="first")
    async with run.process() as one:
        assert one.service.status().current == AdapterRef("main", 1)
        one.learner.metrics = {**watched(0.01), "reward_mean": 0.1}
        assert (await one.service.update(given=GIVEN)).divergences == ()


@pytest.mark.parametrize("reward_is_another", [False, True])
async def test_after_a_crash_the_mean_reward_goes_on_unless_rewards_are_computed_otherwise(
    tmp_path: Path, reward_is_another: bool
) -> None:
    """The updates that are made again had the rewards of the process before."""
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        for _ in range(2):
            await one.request(one.service.status().current or BASE_ADAPTER)
            await finished_update(one)
        policy = one.learner.policies["main"]
        assert one.service.status().reward_running_mean == 0.5
    run.reward_key += reward_is_another
    async with run.process() as one:
        assert one.learner.policies["main"] == policy
        assert one.service.status().reward_running_mean == (None if reward_is_another else 0.5)


async def test_a_full_disk_refuses_feedback_and_updates_and_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    run, full = Run(tmp_path / "journal.sqlite", changed(MANUAL, update_frequency=4)), [False]
    commit = JournalFile.commit

    def failing(self, statements) -> None:
        if full[0]:
            raise StorageError("the journal of the run cannot be written: disk full")
        commit(self, statements)

    monkeypatch.setattr(JournalFile, "commit", failing)
    async with run.process() as one:
        ids = await one.request(scorer=None)
        full[0] = True
        with pytest.raises(StorageError, match="disk full"):
            await one.service.trajectories.feedback(ids[0], 1.0)
        ended = await one.finished(BASE_ADAPTER, None)
        assert "disk full: these trajectories will not be trained on" in ended.trajectory_warning
        assert one.service.status().drops == {"not_recorded": 2}
        assert "disk full" in (one.service.status().pause_reason or ""), "nothing is sampled in vain"
        full[0] = False
        await one.service.resume()
        for _ in range(2):
            await one.request()
        full[0] = True
        await until(lambda: one.service.status().state == "paused")
        assert "disk full" in one.service.status().pause_reason
        for _ in range(2):
            with pytest.raises(StorageError, match="disk full"):
                await one.service.update(given=GIVEN)
        assert len(one.learner.batches) <= 1, "after one that is not recorded, nothing is learnt"
        full[0] = False
        await one.service.trajectories.feedback(ids[0], 1.0)
        await one.service.resume()
        await one.service.update(given=GIVEN)
        await until(lambda: one.service.status().state != "updating")
        policy = one.learner.policies["main"]
    async with run.process() as one:
        assert one.learner.policies["main"] == policy
        assert one.states()[ids[1]] == "waiting"


# ---- any history ---------------------------------------------------------------------------------

OPEN = ("waiting", "scored")
ONE_ANSWER = [
    SequenceOutput(0, (5, 2), "a", finish_reason=FinishReason.STOP, sampling_logprobs=(-0.5, -0.1)),
    RequestFinished(1, 2, 0, 0, 0, 1),
]
STEPS = st.lists(
    st.sampled_from(
        [
            *("request", "people", "alone", "feedback", "turn", "turn", "tokens", "episode", "close"),
            *("update", "withheld", "given", "draft", "single", "dull", "held", "skipped", "failed"),
            *("save", "rollback", "crash", "crash"),
        ]
    ),
    max_size=16,
)


@given(STEPS, st.sampled_from([0, 1000]))
@example(["draft", "crash", "draft", "crash", "request", "crash"], 0)
@example(["draft", "crash", "draft", "crash", "request", "crash"], 1000)
@example(["request", "update", "save", "rollback", "crash"], 1000)
@example(["save", "crash", "people", "given", "save", "crash"], 1000)
@settings(max_examples=50, deadline=None)
def test_any_history_with_crashes_ends_as_the_same_history_without(
    tmp_path_factory, steps: list[str], keep: int
) -> None:
    """Policies, baselines, states and rewards are equal: nothing is lost, nothing is trained on twice, and an update
    that came to nothing leaves nothing. `keep` 0: each checkpoint removes what it covers from the journal."""

    async def ends(crashes: bool) -> object:
        run = Run(tmp_path_factory.mktemp("run") / "journal.sqlite", limited(MANUAL, kl_step=0.5))
        run.keep = keep if crashes else 1000
        parts: list[list[str]] = [[]]
        for step in steps:
            if step == "crash" and crashes:
                parts.append([])
            elif step != "crash":
                parts[-1].append(step)
        found: object = None
        for part in parts:
            async with run.process() as one:
                await until(lambda: not one.service.trajectories.groups.in_scoring)
                for step in part:
                    await did(one, step, run)
                one.service.check_integrity()
                newest = one.service.trajectories.buffer.newest(999)
                waiting = {
                    t.trajectory_id: (member.state, member.reward) for t, member in newest if member.state in OPEN
                }
                found = (one.learner.policies["main"], remembered(one), waiting)
        return found

    assert asyncio.run(ends(crashes=True)) == asyncio.run(ends(crashes=False))


@given(STEPS, st.integers(1, 30), st.booleans())
@settings(max_examples=50, deadline=None)
def test_after_a_kill_at_any_commit_the_policy_is_the_one_of_the_last_change_on_the_disk(
    tmp_path_factory, steps: list[str], survive: int, distils: bool
) -> None:
    """Policy and baselines are equal to the bit, and what that change learnt from does not wait again."""

    async def check() -> None:
        run = Run(tmp_path_factory.mktemp("run") / "journal.sqlite", limited(MANUAL, kl_step=0.5))
        if distils:
            run.training, run.teacher = limited(DISTILLATION, kl_step=0.5), Teacher(Scores(), 5.0)
        seen: dict[int, tuple[object, set[str]]] = {}
        commit, left = JournalFile.commit, survive

        def until_the_kill(file: JournalFile, statements: Statements) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                commit(file, statements)
            else:
                one.publisher.save_error = OSError("killed")

        with pytest.MonkeyPatch.context() as patch:
            async with run.process() as one:
                patch.setattr(JournalFile, "commit", until_the_kill)
                for step in ["start", *steps]:
                    with suppress(OSError):
                        await did(one, step, run)
                    training = one.service.loop().training
                    waiting = {ids for ids, state in one.states().items() if state in OPEN}
                    gone = set(one.states()) - waiting
                    seen.setdefault(training.change, ((one.learner.policies["main"], baselines(one)), gone))
        async with run.process() as one:
            numbers = [
                change.number
                for change in await one.service.parts.journal.read(lambda file: file.changes_since("main", 0))
            ]
            policy, gone = seen[max(numbers, default=1)]
            assert (one.learner.policies["main"], baselines(one)) == policy
            assert not gone & {ids for ids, state in one.states().items() if state in OPEN}

    asyncio.run(check())


async def did(one: World, step: str, run: Run) -> None:
    live = one.service.status().current or BASE_ADAPTER
    newest = one.service.trajectories.buffer.newest(999)
    of_people = [each for each, member in newest if member.state in OPEN and each.collection.scorer is None]
    turns = [turn for turn in of_people if turn.collection.episode_id]
    match step:
        case "request" | "people":
            await one.request(live, "exact" if step == "request" else None)
            await until(lambda: not one.service.trajectories.groups.in_scoring)
        case "alone":
            one.requests += 1
            await alone(one, f"r{one.requests}")
        case "turn":
            one.requests += 1
            spec = CollectionSpec(None, group_id=f"g{run.group}", group_size=2, episode_id=f"e{one.requests % 2}")
            asked = GenerationRequest(
                f"r{one.requests}", ((1,),), SamplingParams(), StopParams(4), adapter=live, collection=spec
            )
            _ = [
                event async for event in one.service.trajectories.collect(asked, FakeEngine(ONE_ANSWER).generate(asked))
            ]
        case "feedback" if of_people:
            await one.service.trajectories.feedback(of_people[-1].trajectory_id, float(one.requests % 3) - 1)
        case "tokens" if of_people:
            await one.service.trajectories.reward_tokens(of_people[0].trajectory_id, (0.5, float(one.requests % 2)))
        case "episode" if turns:
            of_turn = turns[0].collection
            await one.service.trajectories.reward_episode(of_turn.episode_id, of_turn.group_id, float(one.requests % 3))
        case "close" if any(member.reward is not None and each in turns for each, member in newest):
            await one.service.trajectories.close_group(turns[0].group_id)
            run.group += 1  # after a crash nobody knows of a group that has ended
        case "update" | "given" | "draft":
            run.group += 1
            await one.service.update(given=None if step == "update" else GIVEN, publish=step != "draft")
        case "single" | "held" | "skipped" | "failed" | "dull":
            run.group += 1
            await single(one, run.group, step)
        case "withheld":
            run.group += 1
            one.learner.metrics = {"loss": 0.5, "kl_step": 1.0}
            await one.service.update()
            one.learner.metrics = {"loss": 0.5}
        case "save":
            # a rollback to a version that only a checkpoint has drops what waits, unless a restart made it live before
            is_published = live != BASE_ADAPTER and not one.service.loop().training.unpublished
            await one.service.save(None, None, ["first"] if is_published and not has_first(one) else [], {})
        case "rollback" if has_first(one):
            await one.service.rollback(to="first")


async def alone(one: World, request_id: str) -> str:
    """An answer without a group, and the reward of a scorer."""
    live, spec = one.service.status().current or BASE_ADAPTER, CollectionSpec("exact")
    asked = GenerationRequest(request_id, ((1,),), SamplingParams(), StopParams(4), adapter=live, collection=spec)
    events = one.service.trajectories.collect(asked, FakeEngine(ONE_ANSWER).generate(asked))
    (answer,) = [event async for event in events][-1].trajectory_ids
    await until(lambda: not one.service.trajectories.groups.in_scoring)
    return answer


async def single(one: World, number: int, ends: str = "single") -> None:
    """An update of answers without a group, whose rewards are compared with those before. `dull`: they are equal."""
    rewards = [0.25] * 2 if ends == "dull" else [number % 5 / 4, number % 3 / 2]
    given = [GivenTrajectory((1, at), (2,), reward, f"s{at}") for at, reward in enumerate(rewards)]
    one.learner.metrics = {"loss": 0.5, "kl_step": 1.0 if ends == "held" else 0.1}
    one.learner.skip = "loss_not_finite" if ends == "skipped" else ""
    one.learner.error = OSError("device") if ends == "failed" else None
    with suppress(OSError):
        report = await one.service.update(given=given)
        assert report.status in {"held": ("held", "skipped"), "skipped": ("skipped",)}.get(ends, report.status)
    one.learner.metrics, one.learner.skip, one.learner.error = {"loss": 0.5}, "", None


def baselines(one: World) -> Mapping[str, float]:
    return one.service.loop().training.rewards.baselines()


def remembered(one: World) -> tuple[object, ...]:
    """What the run knows of its rewards: the baselines, and the means by which a fall is judged."""
    return baselines(one), one.service.loop().training.rewards.trend.scorers


async def test_a_fall_that_paused_training_is_not_forgotten_by_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", changed(SETTINGS, update_frequency=8))
    paused = changed(run.training.divergence.reward, action=Action.PAUSE)
    run.training = run.training.model_copy(
        update={"divergence": run.training.divergence.model_copy(update={"reward": paused})}
    )
    async with run.process() as one:
        for _ in range(48):
            rewards = cycle([1.0, 0.9])
            one.scorers.rewards = lambda _, rewards=rewards: next(rewards)
            await one.request(one.service.status().current or BASE_ADAPTER)
            await settle()
        assert one.service.status().state != "paused"
        rewards = cycle([0.0, 0.1])
        one.scorers.rewards = lambda _: next(rewards)
        while one.service.status().state != "paused":
            await one.request(one.service.status().current or BASE_ADAPTER)
            await settle()
    async with run.process() as one, asyncio.timeout(10):
        await until(lambda: one.service.status().state == "paused")


def has_first(one: World) -> bool:
    return any("first" in card.tags for card, _ in one.publisher.saved)


async def test_an_update_that_left_a_plateau_is_made_again_with_the_answers_that_it_remembered(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", limited(changed(SETTINGS, update_frequency=2), reward=None))
    async with run.process() as one:
        await one.request()  # rewards 1 and 0
        await until(lambda: one.service.status().step == 1)
        one.scorers.rewards = lambda _: 0.3
        for _ in range(2):
            await one.request(AdapterRef("main", 1))
            await settle()
        await until(lambda: one.service.status().step == 2)
        made = one.learner.batches[-1]
        assert [sample.sampling_logprobs == () for sample in made.samples].count(True) == 1, "it earned more, long ago"
        policy = one.learner.policies["main"]
        await one.service.parts.journal.flush()
    async with run.process() as one:
        assert one.learner.batches[-1].samples == made.samples
        assert one.learner.policies["main"] == policy


# ---- a teacher ------------------------------------------------------------------------------------

DISTILLATION = changed(MANUAL, loss=loss_config(Algorithm.DISTILLATION))


class Scores:
    """A teacher's scores, which differ each time. It cannot score token 3."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    async def __call__(self, ids: tuple[int, ...], first: int) -> list[float | None]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return [None, *(None if token == 3 else -self.asked / (7 + token) for token in ids[1:])]


async def test_an_update_is_made_again_with_the_logprobs_that_the_teacher_gave(tmp_path: Path) -> None:
    """And without the samples that it could not score."""
    run, scores = Run(tmp_path / "journal.sqlite", DISTILLATION), Scores()
    run.teacher = Teacher(scores, 5.0)
    async with run.process() as one:
        await one.request()
        await finished_update(one)
        await one.service.update(given=GIVEN)
        assert [len(batch.samples) for batch in one.learner.batches] == [2, 1]
        policy, batches = one.learner.policies["main"], one.learner.batches
    scores.error = EngineError("gone")
    async with run.process() as one:
        assert one.learner.policies["main"] == policy
        assert [batch.samples for batch in one.learner.batches] == [batch.samples for batch in batches]


@pytest.mark.parametrize(
    ("later", "samples"),
    [(MANUAL, [2]), (changed(MANUAL, loss=loss_config(Algorithm.DISTILLATION, mask_truncated=True)), [])],
)
@pytest.mark.parametrize("is_old", [False, True])
async def test_other_settings_of_the_loss_do_not_keep_a_server_from_starting_after_a_crash(
    tmp_path: Path,
    later: ResolvedTraining,
    samples: list[int],
    is_old: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update has its own ones, unless an older version has written the journal: then, under the later ones, it may
    have other samples than the teacher has scored."""
    run = Run(tmp_path / "journal.sqlite", DISTILLATION)
    run.teacher = Teacher(Scores(), 5.0)
    async with run.process() as one:
        one.engine = FakeEngine(
            [
                SequenceOutput(0, (5, 2), "a", finish_reason=FinishReason.STOP, sampling_logprobs=(-0.5, -0.1)),
                SequenceOutput(1, (5, 2), "a", finish_reason=FinishReason.LENGTH, sampling_logprobs=(-0.5, -0.1)),
                RequestFinished(1, 4, 0, 0, 0, 1),
            ]
        )
        await one.request()
        one.scorers.rewards = lambda _: 0.5
        await one.request()
        assert (await finished_update(one)).metrics["groups"] == 2
        made, policy = [len(batch.samples) for batch in one.learner.batches], one.learner.policies["main"]
    run.training = later
    if is_old:
        monkeypatch.setattr(JournalFile, "settings", lambda _: {})
    async with run.process() as one:
        assert [len(batch.samples) for batch in one.learner.batches] == (samples if is_old else made)
        assert ("under the present settings" in caplog.text) == (is_old and samples == [])
        assert is_old or one.learner.policies["main"] == policy
        assert (await one.service.update(given=GIVEN)).status == "published"


# ---- the best version -----------------------------------------------------------------------------


class FirstUpdateIsBest:
    """An evaluator: the version of step 1 reaches most."""

    key = 1.0

    async def evaluate(self, version: AdapterRef, step: int) -> EvaluationResult:
        mean = 0.9 if step == 1 else 0.6
        return EvaluationResult(version, step, mean, mean - 0.1, mean + 0.1, 8, 0, 5.0)


async def test_a_version_that_a_run_has_marked_as_the_best_one_is_still_that_after_a_crash(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite")
    async with run.process() as one:
        await one.service.loop().mark_best()
        await one.service.update(given=GIVEN)
        await one.service.loop().mark_best()
        best = one.learner.policies["main"]
        await one.service.update(given=GIVEN)
    async with run.process() as one:
        assert one.service.status().current == AdapterRef("main", 2)
        assert one.service.status().best == AdapterRef("main", 1)
        await one.service.rollback()
        assert one.learner.policies["main"] == best


class BaseIsBest(FirstUpdateIsBest):
    async def evaluate(self, version: AdapterRef, step: int) -> EvaluationResult:
        return await super().evaluate(version, step + 1)


async def test_a_rollback_to_the_base_model_outlives_a_crash_although_that_was_saved_before(tmp_path: Path) -> None:
    run = Run(tmp_path / "journal.sqlite", changed(MANUAL, every=1))
    run.evaluator = BaseIsBest()
    async with run.process() as one:
        await one.service.save(None, None, ["start"], {})
        for _ in range(2):
            await one.service.update(given=GIVEN)
        await one.service.save(None, None, [], {})
        await one.service.rollback()
        assert one.learner.policies["main"] == (0.0, 0)
        await one.service.update(given=GIVEN)
        found = one.service.status().current, one.learner.policies["main"]
    async with run.process() as one:
        assert (one.service.status().current, one.learner.policies["main"]) == found
        saved = {card.name for card, _ in one.publisher.saved}
        for _ in range(2):
            await one.service.rollback()
            assert one.learner.policies["main"] == (0.0, 0)
        assert {card.name for card, _ in one.publisher.saved} == saved, "it is saved already"


@pytest.mark.parametrize("floor", [None, 0.5])
@pytest.mark.parametrize("crashes_before", [False, True])
async def test_a_crash_between_the_checkpoints_of_the_best_and_the_last_version_repeats_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor: float | None, crashes_before: bool
) -> None:
    """The best version is saved first, so a restart may continue from it: it names the updates that are in it."""
    run = Run(tmp_path / "journal.sqlite", changed(MANUAL, every=1, eval_floor=floor))
    run.evaluator = FirstUpdateIsBest()
    async with run.process() as one:
        await single(one, 1)
        if not crashes_before:
            await between_checkpoints(one, monkeypatch)
            found = one.learner.policies["main"], remembered(one)
    if crashes_before:
        monkeypatch.setattr(AdapterTraining, "save_if_due", nothing)
        async with run.process() as one:
            await between_checkpoints(one, monkeypatch)
            found = one.learner.policies["main"], remembered(one)
        monkeypatch.undo()
    assert [card.adapter for card, _ in run.saved] == [AdapterRef("main", 1)]
    async with run.process() as one:
        assert (one.learner.policies["main"], remembered(one)) == found
        assert one.service.status().best == AdapterRef("main", 1)


async def nothing(_: AdapterTraining, now: bool = False) -> None:
    """In place of `save_if_due`: the process is killed before it."""


async def between_checkpoints(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second update, and a save that writes the best version only."""
    await single(one, 2)
    save = one.publisher.save

    async def once(*parts: object, **options: object) -> CheckpointCard:
        card = await save(*parts, **options)
        one.publisher.save_error = OSError("killed")
        return card

    monkeypatch.setattr(one.publisher, "save", once)
    with pytest.raises(OSError, match="killed"):
        await one.service.save(None, None, [], {})
