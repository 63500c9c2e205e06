"""The dashboard in a browser, against a real server on the bundled model. Look at its screenshots, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clients.dashboards import (
    ROOT,
    SOURCES,
    browse,
    install_packages,
    learning_server,
    needs_chromium,
    needs_npm,
    traffic,
)
from clients.running import Report, printed
from main_job.serving import Server, start, stop
from server.keys import key_file
from tiny import save_tiny

BUILT = ROOT / "mlx_parallm" / "server" / "dashboard" / "built"
PARTS = ["Tokens a second", "Device time", "Memory", "Answers at once", "By adapter"]
MOST_KB, MOST_PAINT_S, MOST_BACK_S = 200, 1.0, 3.0

pytestmark = [pytest.mark.timeout(900), needs_npm]


@needs_chromium
class TestNow:
    def test_it_says_what_to_do_when_nobody_asks(self, pictures: Path) -> None:
        server = start()
        try:
            seen = browse("now.idle", server.url, pictures)
        finally:
            stop(server)
        assert seen["command"].startswith(f"curl {server.url}/v1/chat/completions")
        assert (seen["faults"], seen["errors"]) == ([], [])

    def test_every_look_while_clients_stream(self, server: Server, pictures: Path, report: Report) -> None:
        with traffic(server):
            looks = browse("now.looks", server.url, pictures)
        for look, seen in looks.items():
            assert (seen["faults"], seen["errors"], seen["sideways"]) == ([], [], False), look
            assert all(map(str.startswith, seen["parts"], PARTS)), look
            assert len(seen["parts"]) == len(PARTS), look
            assert "Generated: now" in seen["chart"]
            assert "Decode" in seen["device"]
            assert "Training" not in seen["device"] + seen["memory"], "this server does not train"
        most = {figure: max(seen[figure] for seen in looks.values()) for figure in ("kilobytes", "first_paint_s")}
        report("page", most["kilobytes"], "kB", MOST_KB)
        report("first paint", most["first_paint_s"], "s", MOST_PAINT_S)
        assert most["kilobytes"] < MOST_KB

    def test_it_comes_back_after_a_lost_connection(self, server: Server, pictures: Path, report: Report) -> None:
        seen = browse("now.lost", server.url, pictures)
        report("back after a lost connection", seen["back_after_s"], "s", MOST_BACK_S)
        assert seen["faults"] == []

    def test_it_says_what_a_role_may_not_do(self, tmp_path: Path, pictures: Path) -> None:
        file, sent = key_file(tmp_path, reader="inference", boss="admin")
        secrets = {name: headers["authorization"].removeprefix("Bearer ") for name, headers in sent.items()}
        server = start("--keys-file", str(file))
        try:
            seen = browse("now.login", server.url, pictures, key=secrets["reader"])
            paused = browse("now.pause", server.url, pictures, key=secrets["boss"])
        finally:
            stop(server)
        assert seen["asked"] == f"{server.url}/login?next=/"
        assert (seen["caller"], seen["left_to"]) == ("reader (inference)", f"{server.url}/login")
        assert (seen["pause_enabled"], seen["why"]) == (False, "needs a key with the role admin; yours is inference")
        assert "Paused" in paused["told"]
        assert seen["faults"] == seen["errors"] == paused["faults"] == paused["errors"] == []


@needs_chromium
class TestTeach:
    @pytest.mark.timeout(2400)
    def test_the_first_hour(self, tmp_path: Path, pictures: Path, report: Report) -> None:
        server = start("--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
        try:
            seen = browse("teach.first_hour", server.url, pictures)
            wrong = browse("teach.ended", server.url, pictures)
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
        assert (seen["faults"], seen["errors"]) == ([], [])
        assert not any(wrong.values()), wrong

    def test_a_server_that_does_not_train_says_how_to_start_one(self, server: Server, pictures: Path) -> None:
        seen = browse("teach.obstacle", server.url, pictures)
        assert f"--port {server.url.rpartition(':')[2]}" in seen["command"], "the server's own command"
        assert seen["command"].endswith("--enable-rl-training --checkpoint-dir runs/served")
        assert (seen["faults"], seen["errors"]) == ([], [])

    def test_a_key_that_may_not_teach_is_told_so(self, tmp_path: Path, pictures: Path) -> None:
        file, sent = key_file(tmp_path, reader="inference")
        server = start("--keys-file", str(file), "--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
        try:
            key = sent["reader"]["authorization"].removeprefix("Bearer ")
            seen = browse("teach.role", server.url, pictures, key=key)
        finally:
            stop(server)
        assert "train" in seen["said"]
        assert seen["faults"] == []


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with learning_server(tmp_path_factory.mktemp("learning")) as server:
        yield server


@needs_chromium
class TestTrajectories:
    def test_every_look_during_a_training_run(self, learning: Server, pictures: Path, report: Report) -> None:
        looks = browse("trajectories.looks", learning.url, pictures)
        for look, seen in looks.items():
            assert (seen["faults"], seen["errors"], seen["sideways"]) == ([], [], False), look
            assert seen["samples"] >= 2
            assert seen["advantage_tints"] > 0
            assert seen["logprob_tints"] > 0
            assert "log-probability" in seen["readout"]
            assert "advantage" in seen["readout"]
        most = max(seen["kilobytes"] for seen in looks.values())
        report("page with the view Trajectories", most, "kB", MOST_KB)
        assert most < MOST_KB

    def test_a_person_finds_an_answer_judges_and_corrects_it(self, learning: Server, pictures: Path) -> None:
        body = {"prompt": "Say hello in one word:", "n": 3, "max_tokens": 6, "collect_trajectory": True}
        ids = learning.post("/v1/completions", **body)["trajectory_ids"]
        learning.post("/v1/training/pause")
        try:
            seen = browse("trajectories.judges", learning.url, pictures)
        finally:
            learning.post("/v1/training/resume")
        after = learning.get(f"/v1/training/trajectories/{ids[1]}")
        assert "fate=waiting" in seen["address"]
        assert seen["again"] == seen["address"], "the address opens the same group with the same filters"
        assert "Counted: its reward is 1." in seen["told"]
        assert "The correction waits for an update" in seen["told"]
        second = after["members"][1]
        assert (second["reward"], second["turns"][0]["thumbs_up"]) == (1, 1)
        assert [edit["text"] for edit in second["turns"][0]["edits"]] == ["Hello!"]
        assert "Corrected to: Hello!" in seen["sample"]
        assert seen["closed"] == "Trained on, so thumbs count no longer; a correction does."
        assert (seen["faults"], seen["errors"]) == ([], [])

    def test_new_groups_are_announced_and_not_inserted(self, learning: Server, pictures: Path) -> None:
        seen = browse("trajectories.announces", learning.url, pictures)
        assert seen["before"] == seen["while_new_ones_came"]
        assert seen["after"] != seen["before"]
        assert (seen["faults"], seen["errors"]) == ([], [])

    def test_ten_thousand_groups(self, tmp_path: Path, pictures: Path, report: Report) -> None:
        save_tiny("llama", tmp_path / "model")
        flags = ("--model-path", str(tmp_path / "model"), "--trajectory-buffer-size", "20000")
        server = start(*flags, "--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
        try:
            for number in range(0, 10_000, 100):
                prompts = [f"prompt {number + each}" for each in range(100)]
                server.post("/v1/completions", prompt=prompts, max_tokens=1, collect_trajectory=True)
            with gaps(server) as largest:
                seen = browse("trajectories.many", server.url, pictures)
        finally:
            stop(server)
        assert seen["rows"] >= 10_000
        report("10,000 groups: longest task of the page, in processor time", seen["longest_task_ms"], "ms", 100)
        report("10,000 groups: longest answer of /liveness meanwhile", 1000 * largest[0], "ms")
        assert (seen["faults"], seen["errors"]) == ([], [])

    def test_a_server_that_does_not_train_says_how_to_start_one(self, server: Server, pictures: Path) -> None:
        seen = browse("trajectories.off", server.url, pictures)
        assert any("--enable-rl-training" in command for command in seen["commands"])
        assert seen["faults"] == seen["errors"] == []

    def test_keys_see_what_they_may(self, tmp_path: Path, pictures: Path) -> None:
        file, sent = key_file(tmp_path, reader="inference", teacher="train", other="train")
        secrets = {name: headers["authorization"].removeprefix("Bearer ") for name, headers in sent.items()}
        server = start("--keys-file", str(file), "--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
        try:
            body = {"prompt": "Mine:", "n": 2, "max_tokens": 4, "collect_trajectory": True}
            assert server.http.post("/v1/completions", json=body, headers=sent["teacher"]).status_code == 200
            seen = {name: browse("trajectories.roles", server.url, pictures, key=key) for name, key in secrets.items()}
        finally:
            stop(server)
        assert seen["reader"]["said"].startswith("Collected answers are shown to keys with the role train; yours is")
        assert seen["teacher"]["said"] == "Mine:"
        assert seen["other"]["said"].startswith("Nothing that your key may see was collected")
        for one in seen.values():
            assert one["faults"] == one["errors"] == []


@contextmanager
def gaps(server: Server) -> Iterator[list[float]]:
    """The longest time that the event loop took to answer while the block ran, in seconds."""
    over, largest = threading.Event(), [0.0]

    def keep_asking() -> None:
        while not over.is_set():
            began = time.monotonic()
            server.get("/liveness")
            largest[0] = max(largest[0], time.monotonic() - began)
            time.sleep(0.01)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        yield largest
    finally:
        over.set()
        asking.join()


@needs_chromium
class TestLearning:
    def test_every_look_during_a_training_run(self, learning: Server, pictures: Path, report: Report) -> None:
        looks = browse("learning.looks", learning.url, pictures)
        for look, seen in looks.items():
            assert (seen["faults"], seen["errors"], seen["sideways"]) == ([], [], False), look
            assert "Mean reward over updates" in seen["charts"][0]
            assert len(seen["charts"]) >= 7, "loss, KL, entropy, clipping, staleness, length"
            assert "live: default@" in seen["lineage"]
        most = max(seen["kilobytes"] for seen in looks.values())
        report("page with the view Learning", most, "kB", MOST_KB)
        assert most < MOST_KB

    def test_adapters_in_every_look(self, learning: Server, pictures: Path) -> None:
        for look, seen in browse("adapters.looks", learning.url, pictures).items():
            assert (seen["faults"], seen["errors"], seen["sideways"]) == ([], [], False), look
            assert seen["route"] == "Requests that name no adapter: default 100 %"

    def test_training_is_steered_from_the_page(self, learning: Server, pictures: Path) -> None:
        seen = browse("learning.steers", learning.url, pictures)
        assert "rolled back" in seen["states"]
        for moment in ("Updates paused", "Updates resumed", "Rolled back to default@", "saved as checkpoint-"):
            assert moment in seen["moments"]
        assert "rolled back: 0" not in seen["lineage"]
        assert seen["faults"] == seen["compared_faults"] == seen["errors"] == []

    def test_a_server_that_does_not_train_says_how_to_start_one(self, server: Server, pictures: Path) -> None:
        seen = browse("learning.off", server.url, pictures)
        assert any("--enable-rl-training" in command for command in seen["commands"])
        assert seen["faults"] == seen["errors"] == []

    def test_roles_are_said_in_words(self, tmp_path: Path, pictures: Path) -> None:
        file, sent = key_file(tmp_path, reader="inference", teacher="train")
        secrets = {name: headers["authorization"].removeprefix("Bearer ") for name, headers in sent.items()}
        server = start("--keys-file", str(file), "--enable-rl-training", "--checkpoint-dir", str(tmp_path / "run"))
        try:
            reader, teacher = (browse("learning.roles", server.url, pictures, key=key) for key in secrets.values())
        finally:
            stop(server)
        assert reader["refused"].startswith(
            "How adapters learn is shown to keys with the role train; yours is inference."
        )
        assert not {"Learning", "Trajectories", "Teach"} & {*reader["listed"]}
        assert {"Learning", "Trajectories", "Teach"} <= {*teacher["listed"]}
        assert (reader["may_load"], teacher["may_load"]) == (False, True)
        assert reader["why"] == ["needs a key with the role train; yours is inference"]
        assert teacher["refused"] == "needs a key with the role admin; yours is train"
        assert reader["faults"] == reader["errors"] == teacher["faults"] == teacher["errors"] == []


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
