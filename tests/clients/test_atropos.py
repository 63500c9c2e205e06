"""Atropos 0.4.0, unmodified: an environment of its BaseEnv, `run-api` or our server in its place, and our trainer.

The processes are killed in turn, and the journal says what became of every group.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from clients.running import ENVIRONMENT, PYTHON, UV, Report, printed
from main_job.serving import COMMAND, free_port
from tiny import save_tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "protocols" / "atropos"
ATROPOS = "atroposlib==0.4.0"
GROUP, UPDATE, GROUPS = 4, 16, 100
SETTLE_S, POLL_S = 600, 3
LEAST_GAIN = 0.05

pytestmark = pytest.mark.timeout(3600)


class Processes:
    """Server, environment and perhaps `run-api`, each of which can be killed and started again."""

    def __init__(self, folder: Path, with_run_api: bool) -> None:
        save_tiny("qwen3", folder / "model")
        self.folder = folder
        self.port, api_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        api = f"http://127.0.0.1:{api_port}" if with_run_api else self.url
        self.api = api
        feed = ("--atropos-url", api) if with_run_api else ("--atropos-api",)
        self.commands: dict[str, list[str]] = {
            "server": [
                *(*COMMAND, "--port", str(self.port), "--model-path", str(folder / "model"), *feed),
                *("--enable-rl-training", "--update-frequency", str(UPDATE), "--learning-rate", "1e-3"),
                *("--checkpoint-dir", str(folder / "run"), "--checkpoint-interval", "3"),
            ],
            "environment": [
                *(*UV, "run", *PYTHON, "--script", str(EXAMPLE / "environment.py"), "serve"),
                *("--env.tokenizer_name", str(folder / "model"), "--env.rollout_server_url", api),
                *("--env.group_size", str(GROUP), "--env.data_path_to_save_groups", str(folder / "groups.jsonl")),
                *("--openai.base_url", f"{self.url}/v1", "--openai.model_name", str(folder / "model")),
            ],
        }
        if with_run_api:
            run_api = (*UV, "tool", "run", *PYTHON, "--from", ATROPOS, "run-api")
            self.commands["api"] = [*run_api, "--host", "127.0.0.1", "--port", str(api_port)]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.kills: Counter[str] = Counter()

    def start(self, name: str) -> None:
        command = self.commands[name]
        if name == "server" and (self.folder / "run").exists():
            command = [*command, "--resume"]
        log = (self.folder / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT, start_new_session=True
        )
        if name == "server":
            wait(lambda: self.answers("/ready"), 100)

    def keep(self) -> None:
        """Starts again what has ended: an environment ends when its API does not answer for a while."""
        for name, process in self.running.items():
            if process.poll() is not None:
                self.start(name)

    def kill(self, name: str) -> None:
        self.kills[name] += 1
        os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running[name].wait()
        self.start(name)

    def answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path).is_success
        except httpx.TransportError:
            return False

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/v1/training/status").json()

    def settled(self) -> bool:
        """Neither the trajectory API nor the trainer holds enough groups for another update."""
        queued = httpx.get(f"{self.api}/status").json()["queue_size"]
        status = self.status()
        return max(queued, status["groups_ready"]) < UPDATE // GROUP and status["state"] != "updating"

    def stop(self, name: str) -> None:
        process = self.running.pop(name)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} seconds"
        time.sleep(0.2)


class Journal:
    """What the journal of a run says of groups. A group is known by its tokens and logprobs."""

    def __init__(self, folder: Path) -> None:
        file = (folder / "run" / "journal.sqlite").as_uri()
        with closing(sqlite3.connect(f"{file}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT trajectory_id, group_id, body FROM intake WHERE kind = 'trajectory'")
            self.intake = {one: (group, json.loads(body)) for one, group, body in rows}
            self.ends = dict(database.execute("SELECT trajectory_id, state FROM ends"))
            updates = [json.loads(body) for (body,) in database.execute("SELECT body FROM changes WHERE kind='update'")]
        self.trained = [
            one
            for update in updates
            for group in update["groups"]
            for episode in group["episodes"]
            for one in episode["trajectory_ids"]
        ]

    @property
    def groups(self) -> set[str]:
        return {group for group, _ in self.intake.values()}

    def contents(self) -> Counter[tuple[object, ...]]:
        """How often each group is there. Short answers may be alike, but hardly all answers of two groups."""
        groups: dict[str, list[object]] = defaultdict(list)
        for group, body in self.intake.values():
            groups[group] += [*body["prompt_ids"], *body["completion_ids"], *body["sampling_logprobs"]]
        return Counter(map(tuple, groups.values()))


def groups_in_journal(folder: Path) -> int:
    """0 before the server has made the journal's tables."""
    try:
        return len(Journal(folder).groups)
    except sqlite3.OperationalError:
        return 0


def sent(folder: Path) -> int:
    """Groups that the environments have made, over all their lives."""
    return sum(len(file.read_text().splitlines()) for file in folder.glob("groups*.jsonl"))


@pytest.fixture
def processes(tmp_path: Path, with_run_api: bool) -> Iterator[Processes]:
    made = Processes(tmp_path, with_run_api)
    yield made
    for name in ("environment", "server", "api"):
        if name in made.running:
            made.stop(name)


@pytest.mark.parametrize("with_run_api", [False, True])
def test_no_group_is_trained_twice_while_each_process_is_killed_in_turn(
    processes: Processes, tmp_path: Path, with_run_api: bool, report: Report
) -> None:
    for name in ("api", "server", "environment"):
        if name in processes.commands:
            processes.start(name)
    victims = [*processes.commands] * 2
    for number, victim in enumerate(victims, 1):
        enough = number * GROUPS // (len(victims) + 1)

        def has_enough(enough: int = enough) -> bool:
            processes.keep()
            return groups_in_journal(tmp_path) >= enough

        wait(has_enough, SETTLE_S)
        processes.kill(victim)
    wait(lambda: has_enough(GROUPS), SETTLE_S)
    processes.stop("environment")
    wait(processes.settled, SETTLE_S)
    time.sleep(POLL_S)  # a batch may have been on its way from the one to the other
    wait(processes.settled, SETTLE_S)
    processes.stop("server")
    journal = Journal(tmp_path)
    waiting = [one for one in journal.intake if one not in journal.ends]
    most_trained, most_taken = max(Counter(journal.trained).values()), max(journal.contents().values())
    name = f"Atropos (tiny), {'run-api' if with_run_api else '--atropos-api'}"
    report(f"{name}: processes killed", processes.kills.total())
    report(f"{name}: groups that the environment wrote down", sent(tmp_path))
    report(f"{name}: groups taken", len(journal.groups), limit=GROUPS, at_least=True)
    report(f"{name}: times that a group was trained at most", most_trained, limit=1)
    report(f"{name}: trajectories taken and not trained", len(journal.intake) - len(journal.trained))
    assert len(journal.groups) >= GROUPS
    assert most_trained == 1, "trained twice"
    assert most_taken == 1, "taken twice"
    assert len(journal.trained) >= GROUPS * GROUP / 2
    assert {journal.ends[one] for one in journal.trained} == {"trained"}
    assert len(waiting) < UPDATE + GROUP, "what was taken was trained on, or dropped for a reason"


@pytest.mark.parametrize("flags", [(), ("--run-api",)])
def test_rewards_rise(flags: tuple[str, ...], report: Report) -> None:
    output = printed(sys.executable, "train.py", *flags, at=EXAMPLE)
    rewards = [float(value) for value in re.findall(r"^update \d+: reward ([\d.]+)", output, re.MULTILINE)]
    assert len(rewards) >= 6, output
    gain = fmean(rewards[-2:]) - rewards[0]
    name = f"Atropos, {'run-api' if flags else '--atropos-api'}"
    report(f"{name}: reward of the first update", rewards[0])
    report(f"{name}: gain of the last two of {len(rewards)} updates", gain, limit=LEAST_GAIN, at_least=True)
    assert gain >= LEAST_GAIN, output
