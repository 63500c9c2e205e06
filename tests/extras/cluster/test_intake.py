"""What nodes send to the trainer of a cluster, over the trainer's service with stand-ins for the device."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from rl.service_rig import CHECKPOINTING, SETTINGS, World, until

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.requests import CollectionSpec, FinishReason, GenerationRequest, SamplingParams, StopParams
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConflictError, StorageError
from mlx_parallm.extras.cluster.cards import ClusterStatus, VersionState
from mlx_parallm.extras.cluster.running.collection import ClusterCollection, from_message, to_message
from mlx_parallm.extras.cluster.running.run import ClusterIntake
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Arrival, Feedback
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.trajectories import DropReason


@dataclass(eq=False)
class Message:
    """A delivery, and how often it was acknowledged."""

    body: bytes
    acknowledged: int = 0

    async def acknowledge(self) -> None:
        self.acknowledged += 1


def trajectory(name: str, index: int, scorer: str | None = "exact") -> Trajectory:
    return Trajectory(
        trajectory_id=f"traj-{name}-{index}",
        group_id=f"group-{name}",
        group_size=2,
        adapter=BASE_ADAPTER,
        prompt_ids=(1,),
        completion_ids=(5, 2),
        sampling_logprobs=(-0.5, -0.1),
        temperature=1.0,
        text="a",
        finish_reason=FinishReason.STOP,
        collection=CollectionSpec(scorer, {"answer": "4"}),
        created=0.0,
    )


def answers(name: str, scorer: str | None = "exact") -> Message:
    return Message(to_message(Arrival(tuple(trajectory(name, index, scorer) for index in range(2)))))


async def deliveries(taken: asyncio.Event, *messages):
    """Sets `taken` when the reader has done with the last message and asks for another."""
    for message in messages:
        yield message
    taken.set()
    await asyncio.Event().wait()


class Trainer(World):
    """The service of a trainer, with a journal on the disk."""

    def __init__(self, folder) -> None:
        super().__init__(SETTINGS, None, CHECKPOINTING, Journal(JournalFile(folder / "journal.sqlite")))
        self.intake = ClusterIntake(self.service)

    async def take(self, *messages) -> None:
        taken = asyncio.Event()
        reading = asyncio.create_task(self.intake.run(deliveries(taken, *messages)))
        waiting = asyncio.create_task(taken.wait())
        await asyncio.wait([reading, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not reading.done()
        reading.cancel()
        await asyncio.wait([reading])


@pytest.fixture
async def trainer(tmp_path):
    one = Trainer(tmp_path)
    await one.service.start_adapter("main")
    await one.service.pause()
    yield one
    await one.service.close()


async def test_a_message_is_acknowledged_when_its_update_is_in_a_checkpoint(trainer):
    first, second = answers("a"), answers("b")
    await trainer.take(first, second)
    await until(lambda: trainer.service.loop().with_signal == 4)
    report = await trainer.service.update()
    assert report.status == "published"
    await trainer.intake.acknowledge()
    assert (first.acknowledged, second.acknowledged) == (0, 0)
    await trainer.service.save(None, None, (), {})
    await trainer.intake.acknowledge()
    assert (first.acknowledged, second.acknowledged) == (1, 1)


async def test_what_is_dropped_is_acknowledged_without_a_checkpoint(trainer):
    """Else all answers that nobody rewards would wait in memory, and come again every minute, until there is one."""
    dropped, waits = answers("a", scorer=None), answers("b", scorer=None)
    await trainer.take(dropped, waits)
    buffer = trainer.service.trajectories.buffer
    buffer.drop(buffer.find("group-a"), DropReason.TIMEOUT)
    await trainer.take(answers("c", scorer=None))
    assert (dropped.acknowledged, waits.acknowledged) == (1, 0)


async def test_a_turn_that_is_asked_again_leaves_no_message_behind(trainer):
    messages = []
    for name in "ab":
        collection = CollectionSpec(None, group_id="game", group_size=2, episode_id="first", turn=0)
        turn = replace(trajectory(name, 0), group_id="game", collection=collection)
        messages.append(Message(to_message(Arrival((turn,)))))
    await trainer.take(*messages)
    await trainer.intake.acknowledge()
    assert [message.acknowledged for message in messages] == [1, 0]


async def test_groups_of_two_keys_may_have_one_name(trainer):
    messages = []
    for owner in (None, "kim"):
        answered = [trajectory(str(owner), index) for index in range(2)]
        collection = replace(answered[0].collection, group_id="colours", group_size=2)
        answered = [replace(each, owner=owner, group_id="colours", collection=collection) for each in answered]
        messages.append(Message(to_message(Arrival(tuple(answered)))))
    await trainer.take(*messages)
    await until(lambda: trainer.service.loop().with_signal == 4)


async def test_the_next_process_knows_what_the_one_before_has_taken(trainer, tmp_path):
    await trainer.take(answers("a"), answers("b"))
    await until(lambda: trainer.service.loop().with_signal == 4)
    await trainer.service.update()
    await trainer.take(answers("c"))
    await trainer.service.close()
    following = Trainer(tmp_path)
    await following.service.start_adapter("main")
    await following.service.pause()
    learnt, waits = answers("a"), answers("c")
    await following.take(learnt, waits)
    assert (learnt.acknowledged, waits.acknowledged) == (1, 0)
    await until(lambda: following.service.loop().with_signal == 2)
    await following.service.close()


async def test_rewards_come_as_messages_and_what_is_no_message_costs_itself_only(trainer, caplog):
    reward = Message(to_message(Feedback("traj-a-1", 0.25, "ann")))
    stranger = Message(to_message(Feedback("traj-z-0", 1.0)))
    broken = Message(b"{")
    await trainer.take(broken, stranger, answers("a", scorer=None), reward, answers("b", scorer="unknown scorer"))
    assert (broken.acknowledged, stranger.acknowledged, reward.acknowledged) == (1, 1, 1)
    assert caplog.text.count("cannot be trained on") >= 2
    known = trainer.service.trajectories.buffer.member("traj-a-1")
    assert known is not None
    assert known[1].reward == 0.25


# -- the node that sends ---------------------------------------------------------------------------


class FakeCluster:
    """A node's connection to its cluster, in which the adapters `trained` are trained."""

    def __init__(self, *trained: str) -> None:
        self.sent: list[tuple[str, object, str]] = []
        self.trained = trained
        self.error: Exception | None = None

    def status(self) -> ClusterStatus:
        return ClusterStatus("head", True, (), VersionState(trained=frozenset(self.trained)), {}, 0)

    async def send(self, name: str, body: bytes, message_id: str = "") -> None:
        if self.error is not None:
            raise self.error
        self.sent.append((name, from_message(body), message_id))


async def collected(cluster: FakeCluster, world: World, adapter: AdapterRef = BASE_ADAPTER):
    collection = ClusterCollection(cluster, "default")  # type: ignore[arg-type]
    spec = await collection.check(CollectionSpec("exact", {"answer": "4"}), adapter, EVERYTHING)
    asked = GenerationRequest(
        "r1", ((1,),), SamplingParams(), StopParams(4), n=2, adapter=adapter, collection=spec, key="team"
    )
    events = collection.collect(asked, world.engine.generate(asked))
    return [event async for event in events][-1]


async def test_answers_go_to_the_trainer_of_their_adapter_with_an_id(trainer):
    cluster = FakeCluster("default", "math")
    finished = await collected(cluster, trainer)
    assert finished.trajectory_ids == ("traj-r1-0", "traj-r1-1")
    assert finished.trajectory_warning == ""
    await collected(cluster, trainer, AdapterRef("math", 3))
    (to, arrival, message_id), (other, _, _) = cluster.sent
    assert (to, other, message_id) == ("default", "math", "traj-r1-0")
    assert isinstance(arrival, Arrival)
    assert [each.sampling_logprobs for each in arrival.trajectories] == [(-0.5, -0.1)] * 2
    assert arrival.trajectories[0].collection.metadata == {"answer": "4"}
    assert arrival.trajectories[0].owner == "team"


async def test_what_cannot_be_kept_is_said_and_what_nobody_trains_is_refused(trainer):
    cluster = FakeCluster("default")
    cluster.error = StorageError("the cluster cannot keep it now")
    finished = await collected(cluster, trainer)
    assert finished.trajectory_warning == "the cluster cannot keep it now: these trajectories will not be trained on."
    with pytest.raises(ConflictError, match="'math' is not trained in this cluster"):
        await collected(cluster, trainer, AdapterRef("math", 3))
    limited = Reader("team", sees=lambda name: name != "default")
    with pytest.raises(ConflictError, match="'base' is not trained in this cluster"):
        await ClusterCollection(cluster, "default").check(CollectionSpec(), BASE_ADAPTER, limited)  # type: ignore[arg-type]


async def test_rewards_go_to_every_trainer(trainer):
    cluster = FakeCluster("default", "math")
    collection = ClusterCollection(cluster, "default")  # type: ignore[arg-type]
    await collection.feedback("traj-1", 1.0, "ann")
    await collection.reward_episode("episode", "", 0.5)
    await collection.reward_tokens("traj-1", [0.5])
    assert [name for name, _, _ in cluster.sent] == ["default", "math"] * 3
    assert cluster.sent[0][1] == Feedback("traj-1", 1.0, "ann")
    cluster.error = StorageError("it is full")
    with pytest.raises(StorageError, match="it is full"):
        await collection.feedback("traj-1", 1.0)
    with pytest.raises(ConflictError, match="No adapter is trained in this cluster"):
        await ClusterCollection(FakeCluster(), "default").feedback("traj-1", 1.0)  # type: ignore[arg-type]
