"""What the trainer of a cluster publishes, over its service with stand-ins for the device and for NATS."""

from types import SimpleNamespace

import pytest
from rl.service_rig import GIVEN, World, settle
from rl.test_recovery import Run

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.extras.cluster.cards import SharedVersion, VersionState
from mlx_parallm.extras.cluster.running import training
from mlx_parallm.extras.cluster.running.training import ClusterTraining


class Nodes:
    """The other nodes, which take no version that is older than one they have had. They serve the last one."""

    name = "main"

    def __init__(self) -> None:
        self.versions: list[AdapterRef] = []

    async def registry(self) -> VersionState:
        shared = {ref: SharedVersion(ref.name, ref.version, "", 0) for ref in self.versions}
        return VersionState({ref.name: shared[ref] for ref in self.versions[-1:]}, shared)

    async def publish(self, ref: AdapterRef, archive: bytes) -> None:
        assert all(ref.version > each.version for each in self.versions)
        self.versions.append(ref)


@pytest.fixture(autouse=True)
def written(monkeypatch):
    """Adapters without files."""

    async def write(self, ref, folder, form) -> None:
        assert ref in self.versions

    monkeypatch.setattr("rl.fakes.FakePublisher.write", write, raising=False)
    monkeypatch.setattr(training, "pack", lambda folder: b"")


async def begun(nodes: Nodes, world: World) -> ClusterTraining:
    cluster = ClusterTraining(nodes, SimpleNamespace(adapters=world.publisher), world.service, "", "")
    await cluster.begin()
    return cluster


async def three_versions(nodes: Nodes, world: World) -> ClusterTraining:
    """The first one is in a checkpoint with the tag `first`."""
    cluster = await begun(nodes, world)
    for number in range(3):
        assert (await world.service.update(given=GIVEN)).status == "published"
        await cluster.publish_live()
        if number == 0:
            await world.service.save(None, None, ["first"], {})
    return cluster


async def test_nodes_get_what_training_has_gone_back_to_as_a_new_version(tmp_path):
    nodes = Nodes()
    async with Run(tmp_path / "journal.sqlite").process() as world:
        cluster = await three_versions(nodes, world)
        await world.service.rollback(to="first")
        await cluster.publish_live()
        await cluster.publish_live()
        assert [ref.version for ref in nodes.versions] == [1, 2, 3, 4]
        assert world.publisher.versions[nodes.versions[3]] == world.publisher.versions[nodes.versions[0]]
        await world.request(nodes.versions[-1])
        await settle()
        assert (await world.service.update()).status == "published", "what the nodes sample is trained on"
        await cluster.publish_live()
        assert [ref.version for ref in nodes.versions] == [1, 2, 3, 4, 5]


async def test_a_crash_keeps_no_rollback_from_the_nodes(tmp_path):
    nodes, run = Nodes(), Run(tmp_path / "journal.sqlite")
    async with run.process() as world:
        await three_versions(nodes, world)
        first = world.publisher.versions[nodes.versions[0]]
        await world.service.rollback(to="first")
    async with run.process() as world:
        await begun(nodes, world)
        assert [ref.version for ref in nodes.versions] == [1, 2, 3, 4]
        assert world.publisher.versions[nodes.versions[-1]] == first
