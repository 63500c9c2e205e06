"""The dashboard in a browser, against a real server on the bundled model. Look at its screenshots, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.dashboards import (
    ROOT,
    SOURCES,
    browse,
    install_packages,
    keyed_server,
    learning_server,
    needs_chromium,
    needs_npm,
    traffic,
)
from clients.running import Report, printed
from main_job.serving import Server, start, stop
from tiny import save_tiny

BUILT = ROOT / "mlx_parallm" / "server" / "dashboard" / "built"
PARTS = ["Tokens a second", "Device time", "Memory", "Answers at once", "By adapter"]
MOST_KB, MOST_PAINT_S, MOST_BACK_S = 200, 1.0, 3.0

pytestmark = [pytest.mark.timeout(900), needs_npm]


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with learning_server(tmp_path_factory.mktemp("learning")) as server:
        yield server


def check_size(looks: dict[str, Any], view: str, report: Report) -> None:
    most = max(seen["kilobytes"] for seen in looks.values())
    report(f"page with the view {view}", most, "kB", MOST_KB)
    assert most < MOST_KB


@needs_chromium
class TestOfAServerThatDoesNotTrain:
    def test_it_says_what_to_do_when_nobody_asks(self, pictures: Path) -> None:
        server = start()
        try:
            seen = browse("pages.commands", server.url, pictures, view="now")
        finally:
            stop(server)
        assert seen["commands"][0].startswith(f"curl {server.url}/v1/chat/completions")

    @pytest.mark.parametrize("view", ["teach", "trajectories", "learning"])
    def test_it_says_how_to_start_one_that_does(self, server: Server, pictures: Path, view: str) -> None:
        commands = browse("pages.commands", server.url, pictures, view=view)["commands"]
        own = [command for command in commands if "--enable-rl-training" in command]
        assert any(f"--port {server.url.rpartition(':')[2]}" in command for command in own), "the server's own command"

    def test_every_look_while_clients_stream(self, server: Server, pictures: Path, report: Report) -> None:
        with traffic(server):
            looks = browse("now.looks", server.url, pictures)
        for look, seen in looks.items():
            assert [part[: len(begun)] for part, begun in zip(seen["parts"], PARTS, strict=True)] == PARTS, look
            assert "Generated: now" in seen["chart"]
            assert "Decode" in seen["device"]
            assert "Training" not in seen["device"] + seen["memory"], "this server does not train"
        report("first paint", max(seen["first_paint_s"] for seen in looks.values()), "s", MOST_PAINT_S)
        check_size(looks, "Now", report)

    def test_it_comes_back_after_a_lost_connection(self, server: Server, pictures: Path, report: Report) -> None:
        seen = browse("now.lost", server.url, pictures)
        report("back after a lost connection", seen["back_after_s"], "s", MOST_BACK_S)


@needs_chromium
def test_every_role_is_told_what_it_may_not_do(tmp_path: Path, pictures: Path) -> None:
    with keyed_server(tmp_path) as (server, secrets, sent):

        def seen(scenario: str, name: str) -> dict[str, Any]:
            return browse(scenario, server.url, pictures, key=secrets[name])

        reader = seen("now.login", "reader")
        assert reader["asked"] == f"{server.url}/login?next=/"
        assert (reader["caller"], reader["left_to"]) == ("reader (inference)", f"{server.url}/login")
        assert (reader["pause_enabled"], reader["why"]) == (
            False,
            "needs a key with the role admin; yours is inference",
        )
        assert "Paused" in seen("now.pause", "boss")["told"]
        assert "train" in seen("teach.role", "reader")["said"]
        body = {"prompt": "Mine:", "n": 2, "max_tokens": 4, "collect_trajectory": True}
        assert server.http.post("/v1/completions", json=body, headers=sent["teacher"]).status_code == 200
        said = {name: seen("trajectories.roles", name)["said"] for name in ("reader", "teacher", "other")}
        assert said["reader"].startswith("Collected answers are shown to keys with the role train; yours is")
        assert said["teacher"] == "Mine:"
        assert said["other"].startswith("Nothing that your key may see was collected")
        reader, teacher = (seen("learning.roles", name) for name in ("reader", "teacher"))
        assert reader["refused"].startswith(
            "How adapters learn is shown to keys with the role train; yours is inference."
        )
        assert not {"Learning", "Trajectories", "Teach"} & {*reader["listed"]}
        assert {"Learning", "Trajectories", "Teach"} <= {*teacher["listed"]}
        assert (reader["may_load"], teacher["may_load"]) == (False, True)
        assert reader["why"] == ["needs a key with the role train; yours is inference"]
        assert teacher["refused"] == "needs a key with the role admin; yours is train"
        chatting = seen("playground.role", "reader")
        assert chatting["text"]
        assert (chatting["enabled"], chatting["why"]) == (
            False,
            "It needs a key with the role train; yours is inference.",
        )


@needs_chromium
@pytest.mark.timeout(2400)
def test_the_first_hour_of_a_teacher(tmp_path: Path, pictures: Path, report: Report) -> None:
    server = start("--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
    try:
        seen = browse("teach.first_hour", server.url, pictures)
        browse("teach.ended", server.url, pictures)
    finally:
        stop(server)
    report("a lesson: reward at first", seen["first"], "%")
    report("a lesson: reward when it was stopped", seen["last"], "%")
    report("a lesson: until the curve has risen", seen["seconds"], "s")
    assert seen["last"] >= seen["first"] + 20
    assert seen["before"]
    assert seen["now"] != seen["before"]
    base, adapter = seen["tried"]
    assert base != adapter
    assert "Saved with the tag" in seen["told"]


@needs_chromium
class TestTrajectories:
    def test_every_look_during_a_training_run(self, learning: Server, pictures: Path, report: Report) -> None:
        looks = browse("trajectories.looks", learning.url, pictures)
        for seen in looks.values():
            assert seen["samples"] >= 2
            assert min(seen["tints"]) > 0
            assert "log-probability" in seen["readout"]
            assert "advantage" in seen["readout"]
        check_size(looks, "Trajectories", report)

    def test_a_person_finds_an_answer_judges_and_corrects_it(self, learning: Server, pictures: Path) -> None:
        body = {"prompt": "Say hello in one word:", "n": 3, "max_tokens": 6, "collect_trajectory": True}
        ids = learning.post("/v1/completions", **body)["trajectory_ids"]
        learning.post("/v1/training/pause")
        try:
            seen = browse("trajectories.judges", learning.url, pictures)
        finally:
            learning.post("/v1/training/resume")
        assert "fate=waiting" in seen["address"]
        assert seen["again"] == seen["address"], "the address opens the same group with the same filters"
        assert "Counted: its reward is 1." in seen["told"]
        assert "The correction waits for an update" in seen["told"]
        second = learning.get(f"/v1/training/trajectories/{ids[1]}")["members"][1]
        assert (second["reward"], second["turns"][0]["thumbs_up"]) == (1, 1)
        assert [edit["text"] for edit in second["turns"][0]["edits"]] == ["Hello!"]
        assert seen["closed"] == "Trained on, so thumbs count no longer; a correction does."

    def test_new_groups_are_announced_and_not_inserted(self, learning: Server, pictures: Path) -> None:
        seen = browse("trajectories.announces", learning.url, pictures)
        assert seen["before"] == seen["while_new_ones_came"]
        assert seen["after"] != seen["before"]

    def test_ten_thousand_groups(self, tmp_path: Path, pictures: Path, report: Report) -> None:
        save_tiny("llama", tmp_path / "model")
        flags = ("--model-path", str(tmp_path / "model"), "--trajectory-buffer-size", "20000")
        server = start(*flags, "--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
        try:
            for number in range(0, 10_000, 100):
                prompts = [f"prompt {number + each}" for each in range(100)]
                server.post("/v1/completions", prompt=prompts, max_tokens=1, collect_trajectory=True)
            seen = browse("trajectories.many", server.url, pictures)
        finally:
            stop(server)
        assert seen["rows"] >= 10_000
        report("10,000 groups: longest task of the page, in processor time", seen["longest_task_ms"], "ms", 100)


@needs_chromium
class TestWhy:
    def test_what_a_version_learnt_from_and_what_pushed_its_answer(self, tmp_path: Path, pictures: Path) -> None:
        save_tiny("llama", tmp_path / "model")
        flags = ["--model-path", str(tmp_path / "model"), "--enable-rl-training", "--lora-rank", "4"]
        server = start(*flags, "--checkpoint-dir", str(tmp_path / "run"))
        try:
            given = [{"prompt": "abc", "output": each, "reward": float(each == "d")} for each in "def"]
            for _ in range(2):
                server.post("/v1/training/update", trajectories=given)
            body = {"prompt": "abc", "n": 2, "max_tokens": 4, "collect_trajectory": True}
            answer = server.post("/v1/completions", **body)["trajectory_ids"][0]
            versions = browse("why.versions", server.url, pictures, version="default@2")
            answers = browse("why.answers", server.url, pictures, answer=answer)
        finally:
            stop(server)
        assert {(seen["updates"], seen["answers"]) for seen in versions.values()} == {(2, 3)}
        assert {seen["pushes"] for seen in answers.values()} == {6}


@needs_chromium
class TestLearning:
    def test_every_look_during_a_training_run(self, learning: Server, pictures: Path, report: Report) -> None:
        looks = browse("learning.looks", learning.url, pictures)
        for seen in looks.values():
            assert "Mean reward over updates" in seen["charts"][0]
            assert len(seen["charts"]) >= 7, "loss, KL, entropy, clipping, staleness, length"
            assert "live: default@" in seen["lineage"]
        check_size(looks, "Learning", report)

    def test_adapters_in_every_look(self, learning: Server, pictures: Path) -> None:
        looks = browse("adapters.looks", learning.url, pictures)
        assert {seen["route"] for seen in looks.values()} == {"Requests that name no adapter: default 100 %"}

    def test_training_is_steered_from_the_page(self, learning: Server, pictures: Path) -> None:
        seen = browse("learning.steers", learning.url, pictures)
        assert "rolled back" in seen["states"]
        for moment in ("Updates paused", "Updates resumed", "Rolled back to default@", "saved as checkpoint-"):
            assert moment in seen["moments"]
        assert "rolled back: 0" not in seen["lineage"]


def test_the_sources_build_what_is_committed(tmp_path: Path) -> None:
    install_packages()
    types = printed("npm", "run", "--silent", "schema", at=SOURCES)
    assert types == (SOURCES / "src" / "api" / "schema.ts").read_text("utf-8"), "run scripts/dashboard"
    for check in ("lint", "types", "test"):
        printed("npm", "run", "--silent", check, at=SOURCES)
    printed("npx", "vite", "build", "--outDir", str(tmp_path), "--logLevel", "error", at=SOURCES)
    assert contents(tmp_path) == contents(BUILT), "run scripts/dashboard and commit what it builds"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_lock_names_no_registry() -> None:
    """It holds for every registry: packages are checked by their hashes."""
    assert "resolved" not in (SOURCES / "package-lock.json").read_text()
