"""Kills or stops the server below `mlx_parallm_serve --supervise` at random moments, under requests and updates.

Killed: by SIGKILL. Stopped: by SIGSTOP, which looks to the supervisor as a call that hangs and keeps the interpreter
lock does: no sign of life for `--limit` seconds. Counted: seconds until the next answer, adapters or updates that had
been acknowledged and are not there then, and greedy answers of a loaded adapter that differ from the first one.

    uv run python -m benchmarks.studies.supervision [--quick]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.durability.processes import end, free_port, get, post, small_model, start
from benchmarks.lib.figures import Figure, errors, reported

CALM_S = 60.0
"""Seconds without a fault before each fifth one: a server that fails so soon six times in a row is given up."""
PROBE_S = 2.0
"""A probe that a server has accepted just before its end may hang for so long."""
NOT_UP = (OSError, ValueError, HTTPException)
ASKED = {"model": "tone", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
GIVEN = [
    {"prompt_token_ids": [5, 6], "completion_token_ids": [token, 2], "reward": reward, "group_id": "a"}
    for token, reward in ((8, 1), (9, 0))
]


@dataclass(frozen=True)
class Fault:
    """One server that was ended. `away_s`: seconds until the next answer. `lost`: updates and adapters that were
    acknowledged, and are not there. `same`: whether the adapter answers as before."""

    what: str
    after_s: float
    away_s: float
    lost: int
    same: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--limit", type=float, default=10.0, help="--device-timeout of the server, in seconds.")
    parser.add_argument("--longest", type=float, default=15.0, help="Latest moment of a fault, in seconds.")
    parser.add_argument("--quick", action="store_true", help="A small random model, 2 faults within 2 s.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "supervision.json")
    args = parser.parse_args()
    if args.quick:
        args.faults, args.longest = 2, 2.0
    dice = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.quick:
            os.environ["MLX_PARALLM_MODEL__BASE_MODEL_PATH"] = str(small_model(folder / "model"))
        with _served(folder, args.limit) as (process, base):
            found = list(_faults(args.faults, args.longest, dice, process, base, folder))
            status, _ = end(process, signal.SIGTERM, 0.0)
    judged = [*figures(found), errors("exit status after SIGTERM", status)]
    report.show(judged)
    record = {
        "machine": machine.describe(),
        "setting": report.setting(args),
        "faults": [asdict(each) for each in found],
    }
    report.write(args.out, record, judged)
    return int(any(figure.met is False for figure in judged))


def figures(found: Sequence[Fault]) -> Iterator[Figure]:
    for what in ("killed", "stopped"):
        away = [fault.away_s for fault in found if fault.what == what]
        yield Figure(f"servers that were {what}", "", *reported([len(away)]))
        yield Figure(f"until the next answer, of one that was {what}", "s", *reported(away))
    yield errors("acknowledged adapters and updates that were lost", sum(fault.lost for fault in found))
    yield errors("answers that were not as before", sum(not fault.same for fault in found))


@contextmanager
def _served(folder: Path, limit: float) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A supervised server that has made an update, and has loaded a copy of what that made as `tone`."""
    port, run = free_port(), folder / "run"
    run.mkdir()
    flags = ("--supervise", "--device-timeout", str(limit), "--port", str(port), "--update-frequency", "1000")
    process = start("serve", run, folder, "--enable-rl-training", "--allowed-adapter-roots", str(folder), *flags)
    base = f"http://127.0.0.1:{port}/v1"
    try:
        while process.poll() is None and not _update(base):
            time.sleep(0.2)
        saved = post(f"{base}/training/checkpoint", {})
        shutil.copytree(run / "kept" / "default" / saved["name"], folder / "tone")
        post(f"{base}/load_lora_adapter", {"lora_name": "tone", "lora_path": str(folder / "tone")})
        yield process, base
    finally:
        process.terminate()


def _update(base: str) -> int:
    """The step of an update that is acknowledged; 0 if it is not."""
    with suppress(*NOT_UP):
        return int(post(f"{base}/training/update", {"trajectories": GIVEN})["step"])
    return 0


def _faults(
    count: int, longest: float, dice: random.Random, process: subprocess.Popen[bytes], base: str, folder: Path
) -> Iterator[Fault]:
    first, over, steps = post(f"{base}/completions", ASKED)["choices"][0]["text"], threading.Event(), [1]

    def update_again_and_again() -> None:
        while not over.is_set():
            steps.append(_update(base))

    thread = threading.Thread(target=update_again_and_again)
    thread.start()
    try:
        for number in range(count):
            after = dice.uniform(0, longest) + (CALM_S if number % 5 == 4 else 0.0)
            time.sleep(after)
            what = ("killed", "stopped")[number % 2]
            acknowledged = max(steps)
            os.kill(_child(process), signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            began = time.monotonic()
            answer = _next_answer(base, process)
            away = time.monotonic() - began
            lost = (answer is None) + max(0, acknowledged - get(f"{base}/training/status")["step"])
            fault = Fault(what, round(after, 2), round(away, 2), lost, answer == first)
            print(fault, flush=True)
            yield fault
    finally:
        over.set()
        thread.join()


def _child(process: subprocess.Popen[bytes]) -> int:
    """The process id of the server below the supervisor."""
    return int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))


def _next_answer(base: str, process: subprocess.Popen[bytes]) -> Any:
    """The text of the next answer of the adapter; None if the server that answers has no such adapter."""
    while process.poll() is None:
        with suppress(*NOT_UP):
            urllib.request.urlopen(f"{base}/models", timeout=PROBE_S).close()
            break
        time.sleep(0.05)
    with suppress(*NOT_UP):
        return post(f"{base}/completions", ASKED)["choices"][0]["text"]
    return None


if __name__ == "__main__":
    sys.exit(main())
