"""Stops training runs by SIGINT and SIGTERM at random moments. No update that was reported as finished may be lost.

    python benchmarks/durability.py [--stops 20] [--longest 15] [--out benchmarks/results/durability.json]

Half of the stops hit `mlx_parallm_train`, the other half a server whose client posts one update after another. Each
process resumes the run of the one before. The moment is drawn uniformly from the time since the process started, so it
may fall into loading, sampling, training or saving. After each stop, the newest checkpoint must contain every update
that had been reported, as a line of training.jsonl or as an answer over HTTP. The adapters have rank 4.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib import machine

PACKAGE = """
from mlx_parallm.core import CollectionSpec
from mlx_parallm.rl.environments import Task

class Letters:
    def tasks(self, seed):
        number = 0
        while True:
            number += 1
            message = {"role": "user", "content": f"Say a word. {number}"}
            yield Task((message,), CollectionSpec("regex", {"pattern": "[aeiou]{2}"}))
"""
STOPPED_S = 60
COMMON = ("--lora-rank", "4", "--lora-alpha", "8", "--learning-rate", "1e-3", "--log-level", "error")
GIVEN = [
    {"prompt_token_ids": [5, 6], "completion_token_ids": [token, 2], "reward": reward, "group_id": "a"}
    for token, reward in ((8, 1), (9, 0))
]


@dataclass(frozen=True)
class Stop:
    """One process that was stopped. `reported` and `kept` count optimizer steps; `kept` is that of the newest
    checkpoint."""

    what: str
    signal: str
    after_s: float
    took_s: float
    exit_code: int
    reported: int
    kept: int

    @property
    def lost(self) -> int:
        return max(0, self.reported - self.kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--longest", type=float, default=15.0, help="Latest moment, in seconds after the start.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-path", help="Default: the bundled model.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/durability.json"))
    args = parser.parse_args()
    dice = random.Random(args.seed)
    print(f"{'what':<7} {'signal':<8} {'after':>7} {'took':>6} {'exit':>5} {'reported':>9} {'kept':>5} {'lost':>5}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _install(folder)
        if args.model_path:
            os.environ["MLX_PARALLM_MODEL__BASE_MODEL_PATH"] = args.model_path
        stops = [_stop(number, dice, folder, args.longest) for number in range(args.stops)]
    lost = sum(stop.lost for stop in stops)
    print(f"{lost} finished updates lost in {len(stops)} stops; {sum(stop.reported > 0 for stop in stops)} had some")
    report = {"machine": machine.describe(), "lost": lost, "stops": [asdict(stop) for stop in stops]}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if lost else 0


def _stop(number: int, dice: random.Random, folder: Path, longest: float) -> Stop:
    what = ("train", "server")[number % 2]
    run = folder / what
    run.mkdir(exist_ok=True)
    chosen = dice.choice((signal.SIGINT, signal.SIGTERM))
    after = dice.uniform(0, longest)
    reported, exit_code, took = (_train if what == "train" else _serve)(run, folder, chosen, after)
    stop = Stop(what, chosen.name, round(after, 2), round(took, 2), exit_code, reported, _kept(run / "kept"))
    print(
        f"{what:<7} {stop.signal:<8} {after:>6.2f}s {took:>5.2f}s {exit_code:>5} {reported:>9} {stop.kept:>5} "
        f"{stop.lost:>5}",
        flush=True,
    )
    return stop


def _train(run: Path, site: Path, chosen: signal.Signals, after: float) -> tuple[int, int, float]:
    flags = ("--environment", "letters", "--steps", "100000", "--group-size", "8", "--prompts-per-step", "1")
    log = ("--max-tokens", "6", "--log", str(run / "training.jsonl"), "--plot", str(run / "training.png"))
    process = _start("train", run, site, *flags, *log)
    exit_code, took = _end(process, chosen, after)
    lines = (run / "training.jsonl").read_text().splitlines() if (run / "training.jsonl").exists() else []
    return max((json.loads(line)["optimizer_step"] for line in lines), default=0), exit_code, took


def _serve(run: Path, site: Path, chosen: signal.Signals, after: float) -> tuple[int, int, float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = _start("serve", run, site, "--enable-rl-training", "--port", str(port), "--shutdown-timeout", "5")
    steps = [_kept(run / "kept")]
    asking = threading.Thread(target=_ask, args=(port, steps.append, process), daemon=True)
    asking.start()
    exit_code, took = _end(process, chosen, after)
    asking.join()
    return max(steps), exit_code, took


def _ask(port: int, answered: Callable[[int], None], process: subprocess.Popen[bytes]) -> None:
    """Posts one update after another until the process has ended."""
    body = json.dumps({"trajectories": GIVEN}).encode()
    while process.poll() is None:
        try:
            answered(_post(f"http://127.0.0.1:{port}/v1/training/update", body)["step"])
        except (urllib.error.URLError, OSError, ValueError):  # not up yet, draining, or gone
            time.sleep(0.05)


def _post(url: str, body: bytes) -> Any:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=STOPPED_S) as answer:
        return json.loads(answer.read())


def _start(command: str, run: Path, site: Path, *flags: str) -> subprocess.Popen[bytes]:
    code = f"import sys; from mlx_parallm.cli.main import {command}; sys.exit({command}())"
    argv = [sys.executable, "-c", code, *COMMON, "--checkpoint-dir", str(run / "kept"), *flags]
    with (run / "output.txt").open("ab") as output:
        return subprocess.Popen(argv, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": str(site)})


def _end(process: subprocess.Popen[bytes], chosen: signal.Signals, after: float) -> tuple[int, float]:
    """Sends the signal. Returns the process's exit code and the seconds that it took to end."""
    time.sleep(after)
    began = time.monotonic()
    process.send_signal(chosen)
    try:
        return process.wait(STOPPED_S), time.monotonic() - began
    finally:
        process.kill()


def _kept(folder: Path) -> int:
    """The optimizer step of the newest checkpoint below the folder."""
    latest = folder / "default" / "latest"
    if not latest.exists():
        return 0
    return int(json.loads((latest.parent / latest.read_text().strip() / "trainer.json").read_text())["step"])


def _install(site: Path) -> None:
    (site / "durability_letters.py").write_text(PACKAGE)
    info = site / "durability_letters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: durability_letters\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_parallm.environments]\nletters = durability_letters:Letters\n")


if __name__ == "__main__":
    sys.exit(main())
