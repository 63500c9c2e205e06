"""The arithmetic of the simulated cluster, with times for which the result is known."""

from dataclasses import replace

import pytest

from benchmarks.lib.cluster.inputs import Inputs, RouterCost, measured
from benchmarks.lib.cluster.model import ONE_HEAD, Cluster, Design
from benchmarks.lib.cluster.outcome import Scenario, lose_one, simulate

FREE = RouterCost(request_s=0.0, token_s=0.0)
PLAIN = Inputs(
    step_s={1: 0.1},
    prompt_s=0.0,
    update_s=2.0,
    update_samples=8,
    group=1,
    stage_s=0.25,
    adapter_bytes=1000,
    router=FREE,
    link_bytes_s=1000.0,
    registry_s=0.0,
    rows=4,
    live_clients=4,
    rollout_clients=0,
    live_tokens=(10, 10),
    rollout_tokens=(10, 10),
)
"""Every step takes 0.1 s, whatever its rows. An adapter takes 1 s to send and 0.25 s to stage."""


def rate(inputs, nodes, design=ONE_HEAD):
    return simulate(Scenario("", inputs, design), nodes).tokens_s


def test_a_node_gives_each_row_a_token_a_step():
    assert rate(PLAIN, 1) == pytest.approx(40, rel=0.01)
    assert rate(PLAIN, 3) == pytest.approx(120, rel=0.01)


def test_one_router_limits_all_nodes_and_cells_have_their_own():
    """The router takes 0.16 s for each step of 4 nodes, and has its first tokens after 0.1 s; in cells of 2 nodes it
    takes 0.08 s, so that a round lasts as long as 10 steps and the router's last turn."""
    slow = replace(PLAIN, router=RouterCost(request_s=0.0, token_s=0.01))
    assert rate(slow, 4) == pytest.approx(160 / 1.7, rel=0.01)
    assert rate(slow, 4, Design(cell_nodes=2)) == pytest.approx(160 / 1.08, rel=0.03)


@pytest.mark.parametrize(("holders_pass_on", "seconds"), [(False, 1 + 7 + 0.25), (True, 1 + 3 + 0.25)])
def test_a_version_is_live_when_all_nodes_have_pulled_it(holders_pass_on, seconds):
    """From the head, 7 nodes pull one after another; where holders pass it on, 1, 2 and 4 pull at once."""
    inputs = replace(PLAIN, rollout_clients=1, update_samples=40)
    cluster = Cluster(inputs, 7, Design(holders_pass_on=holders_pass_on))
    cluster.add_clients()
    cluster.run(30)
    assert cluster.log.published[0] == pytest.approx(seconds)


def test_stale_trajectories_are_dropped_and_never_trained_on():
    result = simulate(Scenario("", replace(PLAIN, rollout_clients=4, live_clients=0, max_staleness=1)), 8)
    assert 0 < result.staleness <= 1
    assert result.dropped > 0.5
    patient = simulate(Scenario("", replace(PLAIN, rollout_clients=4, live_clients=0, max_staleness=50)), 8)
    assert patient.updates_minute > result.updates_minute


def test_a_lost_node_breaks_its_streams_and_the_others_answer_the_rest():
    inputs = replace(PLAIN, live_clients=4, rollout_clients=2, live_tokens=(7, 13), rollout_tokens=(7, 13))
    killed, stopped = lose_one(inputs, 2, unseen_s=0.0), lose_one(inputs, 2, unseen_s=3.0)
    assert killed.retried + killed.broken >= 4
    assert 0 < killed.broken <= 4
    assert killed.rate_after == pytest.approx(0.5, abs=0.1)
    assert stopped.rate_after == pytest.approx(0.5, abs=0.1)
    assert stopped.slowest_first_token_s > 3.0


def test_the_inputs_come_from_the_records():
    inputs = measured(FREE)
    assert sorted(inputs.step_s) == [1, 8, 16, 32]
    assert inputs.step(12) == pytest.approx((inputs.step_s[8] + inputs.step_s[16]) / 2)
    assert 0 < inputs.prompt_s < inputs.update_s
    assert inputs.faster(10).step(16) == pytest.approx(inputs.step(16) / 10)
