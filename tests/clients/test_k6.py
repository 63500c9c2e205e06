"""k6: virtual users at once, every answer checked."""

from __future__ import annotations

import json

import pytest
from clients.asked import ASKED
from clients.running import tool
from main_job.serving import Server

pytestmark = pytest.mark.timeout(900)

USERS_ROUNDS = 12
CHECKS = {"a completion says Paris", "a chat says Paris", "a stream ends with [DONE]"}


def test_virtual_users(server: Server) -> None:
    command = ("k6", "run", "--quiet", "--no-usage-report", "load.js")
    said = tool("k6>=1.1,<2", *command, BASE_URL=f"{server.url}/v1", ASKED=json.dumps(ASKED))
    summary = json.loads(said)
    passed = {check["name"]: (check["passes"], check["fails"]) for check in summary["checks"]}
    values = {name: metric["values"] for name, metric in summary["metrics"].items()}
    assert passed == dict.fromkeys(CHECKS, (USERS_ROUNDS, 0))
    assert values["iterations"]["count"] == USERS_ROUNDS
    assert values["http_reqs"]["count"] == USERS_ROUNDS * len(CHECKS)
    assert values["http_req_failed"]["rate"] == 0
