"""Stops training runs at random moments, by SIGINT, SIGTERM and SIGKILL. Nothing that was reported may be lost.

    python benchmarks/studies/durability.py [--stops 20] [--kills 50] [--longest 15] [--quick]

Half of the stops hit `mlx_parallm_train`, the other half a server whose client posts one update after another. Each
process resumes the run of the one before. The moment is drawn uniformly from the time since the process started, so it
may fall into loading, sampling, training or saving. After each stop, the newest checkpoint must contain every update
that had been reported, as a line of training.jsonl or as an answer over HTTP.

After a kill, the run's journal must have every trajectory, reward and update that was acknowledged, no trajectory may
be in two updates, and the adapter of a run that was killed must be the one that its journal alone gives, to the bit
(see `lib/durability/kills.py`). The moments of kills are counted from when the model is loaded. The adapters have rank
4. Another run makes updates of which some are held, skipped or fail. After each kill, its weights and the baselines of
its rewards are compared with those of a run that was not killed, to the bit (see `lib/durability/updates.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lib import machine
from benchmarks.lib.durability.kills import kill_runs
from benchmarks.lib.durability.processes import end, free_port, install, post, start
from benchmarks.lib.durability.updates import kill_updates

MAX_FEEDBACK_MS = 20.0
"""95th percentile of the time until feedback is acknowledged."""

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
    parser.add_argument("--stops", type=int, default=20, help="By SIGINT and SIGTERM.")
    parser.add_argument("--kills", type=int, default=50, help="By SIGKILL.")
    parser.add_argument("--quick", action="store_true", help="2 stops, 6 kills, each within 6 s.")
    parser.add_argument("--longest", type=float, default=15.0, help="Latest moment, in seconds after the start.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-path", help="Default: the bundled model.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/durability.json"))
    args = parser.parse_args()
    if args.quick:
        args.stops, args.kills, args.longest = 2, 6, 6.0
    dice = random.Random(args.seed)
    print(f"{'what':<7} {'signal':<8} {'after':>7} {'took':>6} {'exit':>5} {'reported':>9} {'kept':>5} {'lost':>5}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install(folder)
        if args.model_path:
            os.environ["MLX_PARALLM_MODEL__BASE_MODEL_PATH"] = args.model_path
        stops = [_stop(number, dice, folder, args.longest) for number in range(args.stops)]
        killed = kill_runs(args.kills, dice, folder, args.longest)
        updates = kill_updates(args.kills, dice, folder)
    lost, latency = sum(stop.lost for stop in stops), killed["feedback_ms"]
    remade, whole = killed["remade_adapter_difference"], killed["whole_run_adapter_difference"]
    print(f"{lost} finished updates lost in {len(stops)} stops; {sum(stop.reported > 0 for stop in stops)} had some")
    print(
        f"{killed['kills']} kills: {killed['lost']} acknowledged entries lost, {killed['trained_twice']} trajectories "
        f"trained on twice; the adapter differs by {remade:.1e} from that of its journal, by {whole:.1e} from that of "
        f"another run; feedback takes {latency['p50']:.1f} ms, p95 {latency['p95']:.1f} ms, of {latency['count']}"
    )
    print(
        f"{updates['kills']} kills between {updates['changes']} updates: {updates['different']} of "
        f"{updates['compared']} policies and baselines differ from those of a run that was not killed"
    )
    report = {
        "machine": machine.describe(),
        "lost": lost,
        "stops": [asdict(stop) for stop in stops],
        "killed": killed,
        "updates": updates,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    held = remade == 0.0 and not updates["different"] and latency["p95"] <= MAX_FEEDBACK_MS
    return 0 if held and not (lost or killed["lost"] or killed["trained_twice"]) else 1


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
    process = start("train", run, site, *flags, *log)
    exit_code, took = end(process, chosen, after)
    lines = (run / "training.jsonl").read_text().splitlines() if (run / "training.jsonl").exists() else []
    return max((json.loads(line)["optimizer_step"] for line in lines), default=0), exit_code, took


def _serve(run: Path, site: Path, chosen: signal.Signals, after: float) -> tuple[int, int, float]:
    port = free_port()
    process = start("serve", run, site, "--enable-rl-training", "--port", str(port), "--shutdown-timeout", "5")
    steps = [_kept(run / "kept")]
    asking = threading.Thread(target=_ask, args=(port, steps.append, process), daemon=True)
    asking.start()
    exit_code, took = end(process, chosen, after)
    asking.join()
    return max(steps), exit_code, took


def _ask(port: int, answered: Callable[[int], None], process: subprocess.Popen[bytes]) -> None:
    """Posts one update after another until the process has ended."""
    body = {"trajectories": GIVEN}
    while process.poll() is None:
        try:
            answered(post(f"http://127.0.0.1:{port}/v1/training/update", body)["step"])
        except (urllib.error.URLError, OSError, ValueError):  # not up yet, draining, or gone
            time.sleep(0.05)


def _kept(folder: Path) -> int:
    """The optimizer step of the newest checkpoint below the folder."""
    latest = folder / "default" / "latest"
    if not latest.exists():
        return 0
    return int(json.loads((latest.parent / latest.read_text().strip() / "trainer.json").read_text())["step"])


if __name__ == "__main__":
    sys.exit(main())
