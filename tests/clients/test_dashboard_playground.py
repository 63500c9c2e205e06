"""The view Playground in a browser, against real servers on the bundled model, with training and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.dashboards import browse, learning_server, needs_chromium, needs_npm
from clients.running import Report, wait_until_idle
from main_job.serving import Server

MOST_KB = 200

pytestmark = [pytest.mark.timeout(900), needs_npm, needs_chromium]


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with learning_server(tmp_path_factory.mktemp("playground")) as server:
        yield server


def test_two_versions_answer_and_a_thumb_becomes_feedback(learning: Server, pictures: Path) -> None:
    seen = browse("playground.compares", learning.url, pictures)
    assert seen["chosen"] == ["base", "default"]
    assert seen["names"][0].startswith("SmolLM2")
    assert seen["names"][1].startswith("default@")
    assert (seen["turns"], all(seen["texts"])) == (2, True)
    assert "%" in seen["hovered"]
    assert seen["focused"][0] != seen["focused"][1]
    assert "Not of base, because it is not in training." in seen["explained"]
    assert seen["thumbs"] == [0, 1]
    assert learning.get("/v1/training/report")["opinions"] == 1


def test_every_look(learning: Server, pictures: Path, report: Report) -> None:
    looks = browse("playground.looks", learning.url, pictures)
    most = max(seen["kilobytes"] for seen in looks.values())
    report("page with the view Playground", most, "kB", MOST_KB)
    assert most < MOST_KB


def test_the_same_seed_says_the_same(server: Server, pictures: Path) -> None:
    first, second, *others = browse("playground.same_seed", server.url, pictures)
    assert first == second
    assert others[0] == others[1] != first


def test_an_answer_is_stopped(server: Server, pictures: Path) -> None:
    seen = browse("playground.stops", server.url, pictures)
    assert seen["learn"] == "This server does not train; --enable-rl-training starts one that does."
    assert seen["stopped"]
    assert seen["sides"] == 1, "a server without adapters has one version"
    wait_until_idle(server)


def test_a_side_that_fails_says_why_and_the_other_one_answers(server: Server, pictures: Path) -> None:
    seen = browse("playground.fails", server.url, pictures)
    assert "No whole answer" not in seen["texts"][0]
    assert "No whole answer" in seen["texts"][1]
    assert "nobody" in seen["texts"][1]
