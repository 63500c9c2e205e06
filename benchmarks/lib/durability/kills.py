"""Kills runs by SIGKILL at random moments, and compares what they had acknowledged with what the next process has.

Served: clients draw answers, give feedback and ask for updates. What the server has answered is counted as lost if the
journal lacks it, and as trained twice if two updates of the surviving policy have it.
Trained: a run of `mlx_parallm_train` with a fixed number of steps is killed again and again, and then finishes. Its
adapter is compared with one that is made from nothing of its journal alone. They must be equal to the bit: every update
was made once, in order. It is also compared with that of a run that was not killed. Those may differ, because two
processes do not round alike when they sample, and a draw near a boundary then gives another token.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.lib.durability.processes import end, free_port, get, post, start
from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.rl.runs.record import read_record
from mlx_parallm.rl.runs.records import Feedback, Update
from mlx_parallm.rl.runs.store import JournalFile

CLIENTS = 3
STEPS_A_KILL = 25
"""Steps of the run that is killed, for each kill: so many that most kills find it at work."""


@dataclass
class Acknowledged:
    """What a server has answered with success, over all its processes. `feedback`: the last score by trajectory id.
    `step` and `version`: the largest that an update has answered."""

    collected: set[str] = field(default_factory=set)
    feedback: dict[str, float] = field(default_factory=dict)
    latencies_ms: list[float] = field(default_factory=list)
    step: int = 0
    updates: int = 0


@dataclass(frozen=True)
class Killed:
    """One process that was killed, and what was acknowledged until then. `lost`: what of it the journal lacks."""

    what: str
    after_s: float
    collected: int
    feedback: int
    step: int
    lost: int
    trained_twice: int


def kill_runs(kills: int, dice: random.Random, folder: Path, longest: float) -> dict[str, Any]:
    """Kills half of the processes while they serve, and half while they train. Returns the record."""
    known, served, clients = Acknowledged(), folder / "served", random.Random(dice.random())
    served.mkdir()
    found = [_kill_server(served, folder, known, dice.uniform(0, longest), clients) for _ in range((kills + 1) // 2)]
    not_recovered = _not_recovered(served, folder, known)
    trained, remade, difference = _kill_training(kills // 2, dice, folder, longest)
    found += trained
    latencies = sorted(known.latencies_ms) or [0.0]
    return {
        "kills": len(found),
        "lost": sum(one.lost for one in found) + not_recovered,
        "trained_twice": sum(one.trained_twice for one in found),
        "remade_adapter_difference": remade,
        "whole_run_adapter_difference": difference,
        "feedback_ms": {
            "count": len(known.latencies_ms),
            "p50": latencies[len(latencies) // 2],
            "p95": latencies[int(len(latencies) * 0.95)],
            "max": latencies[-1],
        },
        "runs": [asdict(one) for one in found],
    }


# -- a server ------------------------------------------------------------------------------------


def serve(run: Path, site: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server that answers, and its base URL."""
    port = free_port()
    by_request = ("--update-frequency", "100000", "--trajectory-buffer-size", "100000", "--max-staleness", "1000")
    flags = ("--enable-rl-training", *by_request, "--port", str(port), "--checkpoint-interval", "5")
    process, base = start("serve", run, site, *flags), f"http://127.0.0.1:{port}/v1"
    while process.poll() is None:
        try:
            post(f"{base}/completions", {"prompt": "a", "max_tokens": 1})
        except (OSError, ValueError):
            time.sleep(0.1)
        else:
            return process, base
    raise SystemExit(f"the server ended with status {process.returncode}; see its output.txt")


def _not_recovered(run: Path, site: Path, known: Acknowledged) -> int:
    """Steps that were acknowledged, and that the last process does not have."""
    process, base = serve(run, site)
    step = get(f"{base}/training/status")["step"]
    end(process, signal.SIGTERM, 0.0)
    return int(max(0, known.step - step))


def _kill_server(run: Path, site: Path, known: Acknowledged, after: float, dice: random.Random) -> Killed:
    (process, base), lock = serve(run, site), threading.Lock()
    threads = [
        threading.Thread(target=_client, args=(base, process, known, lock, random.Random(dice.random())), daemon=True)
        for _ in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    end(process, signal.SIGKILL, after)
    for thread in threads:
        thread.join()
    lost, twice = missing(run, known)
    return _told(Killed("server", after, len(known.collected), len(known.feedback), known.step, lost, twice))


def _client(
    base: str, process: subprocess.Popen[bytes], known: Acknowledged, lock: threading.Lock, dice: random.Random
) -> None:
    """Draws answers, rewards them, and sometimes asks for an update, until the process has ended."""
    while process.poll() is None:
        try:
            _act(base, known, lock, dice)
        except (OSError, ValueError, HTTPException):  # gone, or a conflict: another client's update took the trajectory
            time.sleep(0.01)


def _act(base: str, known: Acknowledged, lock: threading.Lock, dice: random.Random) -> None:
    body = {"prompt": f"{dice.random()}", "n": 2, "max_tokens": 4, "collect_trajectory": True}
    answer = post(f"{base}/completions", body)
    with lock:
        known.collected.update(answer["trajectory_ids"])
    for trajectory_id in answer["trajectory_ids"]:
        score, began = dice.random(), time.monotonic()
        post(f"{base}/training/feedback", {"trajectory_id": trajectory_id, "score": score})
        with lock:
            known.latencies_ms.append(1000 * (time.monotonic() - began))
            known.feedback[trajectory_id] = score
    if dice.random() < 0.3:
        report = post(f"{base}/training/update", {})
        with lock:
            known.step = max(known.step, report["step"])
            known.updates += report["status"] == "published"


def missing(run: Path, known: Acknowledged) -> tuple[int, int]:
    """How much of what was acknowledged the journal lacks, and how many trajectories two updates have."""
    journal = JournalFile(run / "kept" / JOURNAL, read_only=True)
    updates = [change.body for change in journal.changes_since("default", 0) if isinstance(change.body, Update)]
    used = Counter(one for update in updates for one in update.trajectory_ids)
    rewards = {
        trajectory_id: reward
        for update in updates
        for group in update.groups
        for episode, reward in zip(group.episodes, group.rewards, strict=True)
        for trajectory_id in episode.trajectory_ids
    }
    rewards |= {entry.trajectory_id: entry.score for entry in journal.waiting("default") if isinstance(entry, Feedback)}
    lost = len(known.collected) - len(journal.trajectories(sorted(known.collected)))
    lost += sum(rewards.get(one) != score for one, score in known.feedback.items())
    lost += max(0, known.step - max((update.step for update in updates), default=0))
    journal.close()
    return lost, sum(times > 1 for times in used.values())


# -- a run with a fixed schedule -----------------------------------------------------------------


def _kill_training(kills: int, dice: random.Random, folder: Path, longest: float) -> tuple[list[Killed], float, float]:
    """Returns the killed processes, and the largest difference of a number of the adapter from the one that the journal
    alone gives, and from that of the run that was not killed."""
    steps, found = str(STEPS_A_KILL * max(kills, 1)), []
    run = folder / "killed"
    run.mkdir()
    for _ in range(kills):
        after = dice.uniform(0, longest)
        process = _train(run, folder, steps)
        _wait_until_started(run / "kept", process)
        end(process, signal.SIGKILL, after)
        twice = missing(run, Acknowledged())[1]
        found.append(_told(Killed("train", after, 0, 0, _steps(run), 0, twice)))
    killed = _finished(run, folder, steps)
    again = folder / "again"
    (again / "kept").mkdir(parents=True)
    shutil.copy(run / "kept" / JOURNAL, again / "kept" / JOURNAL)
    return (
        found,
        _difference(killed, _finished(again, folder, steps)),
        _difference(killed, _finished(folder / "whole", folder, steps)),
    )


def _train(run: Path, site: Path, steps: str) -> subprocess.Popen[bytes]:
    run.mkdir(exist_ok=True)
    log = ("--log", str(run / "training.jsonl"), "--plot", str(run / "training.png"))
    flags = ("--environment", "letters", "--group-size", "8", "--prompts-per-step", "1", "--max-tokens", "6")
    return start("train", run, site, *flags, *log, "--checkpoint-interval", "5", "--steps", steps)


def _finished(run: Path, site: Path, steps: str) -> dict[str, Any]:
    """The adapter of a run that has made all its steps."""
    if _train(run, site, steps).wait() != 0:
        raise SystemExit(f"the run in {run} failed; see its output.txt")
    latest = run / "kept" / "default" / "latest"
    return load_file(latest.parent / latest.read_text().strip() / "adapters.safetensors")


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float(np.abs(leaf - other[name]).max()) for name, leaf in one.items())


def _wait_until_started(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Returns when the process has loaded its model, or has ended because nothing is left to do."""
    while process.poll() is None:
        record = read_record(folder) if folder.is_dir() else None
        if record is not None and record.starts[-1].process == process.pid:
            return
        time.sleep(0.05)


def _steps(run: Path) -> int:
    """Updates in the journal."""
    journal = JournalFile(run / "kept" / JOURNAL, read_only=True)
    steps = max((c.body.step for c in journal.changes_since("default", 0) if isinstance(c.body, Update)), default=0)
    journal.close()
    return steps


def _told(one: Killed) -> Killed:
    print(
        f"{one.what:<7} SIGKILL  {one.after_s:>6.2f}s  collected {one.collected:>5}  feedback {one.feedback:>5}  "
        f"step {one.step:>4}  lost {one.lost}  trained twice {one.trained_twice}",
        flush=True,
    )
    return one
