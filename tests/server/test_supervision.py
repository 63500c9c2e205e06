"""What a server with a supervisor reports to it, and restores."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from starlette.middleware import Middleware

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.extras.supervise import Changes, LoadedAdapter
from mlx_parallm.extras.supervise.child import Reporter, ReportingMiddleware, restore, state_of


class Lines(list):
    """A writer to the supervisor."""

    write = list.append


@pytest.fixture
def supervised(client):
    """A client of a server, and what it has reported so far."""
    services, lines = client.app.state.services, Lines()
    reporter = Reporter(services, state_of(services), lines)
    client.app.user_middleware.append(Middleware(ReportingMiddleware, reporter=reporter))
    return client, lines


def report(lines):
    return json.loads(lines[-1])["changes"]


async def test_what_a_control_action_has_changed_is_reported_and_nothing_else(supervised, adapters):
    client, lines = supervised
    adapters.publish("math")
    for request in (
        client.post("/v1/completions", json={"prompt": "x"}),
        client.post("/v1/adapters/route", json={"weights": {"nobody": 1}}),
    ):
        await request
    assert not any(report([line])["route"] for line in lines)
    assert (await client.post("/v1/adapters/route", json={"weights": {"math": 1}})).status_code == 200
    assert report(lines)["route"] == {"math": 1.0}
    assert (await client.post("/v1/training/schedule", json={"mode": "training_priority"})).status_code == 200
    assert report(lines)["schedule"]["training_time_share"] == 0.5
    count = len(lines)
    assert (await client.get("/v1/adapters/route")).status_code == 200
    assert len(lines) == count
    assert (await client.delete("/v1/adapters/route")).status_code == 200
    assert report(lines)["route"] is None, "it is as at the start again"


async def test_adapters_are_told_apart_by_version_and_content(client, adapters):
    services = client.app.state.services
    card = replace(adapters.known[adapters.publish("tone")], root="/tone", digest="1")
    adapters.known[card.ref] = card
    started = state_of(services)
    assert started.adapters == (LoadedAdapter("tone@1", "/tone", "1", ""),)
    lines = Lines()
    reporter = Reporter(services, started, lines)
    adapters.known[card.ref] = replace(card, digest="2")
    reporter.report()
    assert [each["digest"] for each in report(lines)["adapters"]] == ["2"]
    adapters.known.clear()
    reporter.report()
    reporter.report()
    assert (report(lines)["unloaded"], len(lines)) == (["tone"], 2), "what was reported is no news"


async def test_what_cannot_be_restored_keeps_nothing_else_from_it(client, adapters, engine, caplog):
    adapters.publish("found")
    schedule = DeviceSchedule(0.25, 2.0)
    changes = Changes((LoadedAdapter("found@1", "/f", "", ""),), ("never", "found"), {"nobody": 1.0}, schedule)
    await restore(changes, client.app.state.services)
    assert engine.stats().schedule == schedule
    assert not adapters.known, "it was unloaded before, and is not loaded again by what is older"
    assert "the route is not as before the restart" in caplog.text
