"""`/metrics` of a node: the head has series of all nodes that are present, another node those of itself."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.fake_cluster import HEAD, FakeCluster, app_of

from mlx_parallm.extras.cluster.cards import NodeInfo, NodeRole

OTHERS = (
    NodeInfo("replica-1", NodeRole.REPLICA, "http://10.0.0.2:8000", (), 40, False, "y"),
    NodeInfo("trainer-1", NodeRole.TRAINER, "", (), 0, False, "z"),
)


async def samples(client):
    """The values of the samples about the cluster, by name and labels."""
    text = (await client.get("/metrics")).text
    families = [each for each in text_string_to_metric_families(text) if each.name.startswith("mlx_parallm_cluster_")]
    assert families
    return {
        (sample.name.removeprefix("mlx_parallm_cluster_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_the_head_has_all_nodes_and_what_its_router_did(head):
    head.cluster.nodes = (HEAD, *OTHERS)
    counts = head.app.state.services.cluster.counts
    counts.requests.update({"head": 2, "replica-1": 5, "gone-1": 9})
    counts.retried, counts.broken = 4, 1
    assert await samples(head) == {
        ("node_ready", "head", "head"): 1,
        ("node_ready", "replica-1", "replica"): 0,
        ("node_ready", "trainer-1", "trainer"): 0,
        ("node_outstanding_tokens", "head", "head"): 7,
        ("node_outstanding_tokens", "replica-1", "replica"): 40,
        ("node_outstanding_tokens", "trainer-1", "trainer"): 0,
        ("node_versions_held", "head", "head"): 1,
        ("node_versions_held", "replica-1", "replica"): 0,
        ("node_versions_held", "trainer-1", "trainer"): 0,
        ("requests_total", "head", "head"): 2,
        ("requests_total", "replica-1", "replica"): 5,
        ("requests_total", "trainer-1", "trainer"): 0,
        ("requests_to_learn", "math"): 6,
        ("connected",): 1,
        ("versions_staged",): 1,
        ("versions_live",): 1,
        ("versions_unusable",): 1,
        ("nodes_lost_total",): 3,
        ("requests_retried_total",): 4,
        ("streams_broken_total",): 1,
    }


async def test_another_node_has_only_its_own_series(engine, adapters):
    cluster = FakeCluster(routes=False)
    cluster.node, cluster.nodes = "replica-1", (HEAD, *OTHERS)
    transport = httpx.ASGITransport(app_of(engine, adapters, cluster))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        found = await samples(client)
    assert [key for key in found if len(key) > 1] == [
        (name, "replica-1", "replica") for name in ("node_ready", "node_outstanding_tokens", "node_versions_held")
    ]
    assert found[("connected",)] == 1
    assert not [name for (name, *_) in found if name in ("requests_retried_total", "streams_broken_total")]


@pytest.mark.parametrize("is_node", [True, False])
async def test_the_figures_of_now_say_whether_there_is_a_cluster(head, client, is_node):
    asked = head if is_node else client
    assert (await asked.get("/v1/stats")).json()["cluster"] is is_node
