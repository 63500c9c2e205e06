"""Forgets what an adapter has learnt from, and compares it with an adapter that never had it.

    python benchmarks/studies/forget.py [--updates 60] [--choices 20] [--kills 20] [--quick]

Three keys teach one adapter for some updates. Then a key, or a random choice of trajectories, of a time or of a key, is
forgotten. The adapter and the optimizer's state must be, to the bit, those of a run that was taught without it. While a
key is forgotten, the process is killed (SIGKILL) at random moments and started again until nothing is left to do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.lib import machine
from benchmarks.lib.durability.processes import small_model
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.forgetting.taught import BOB, KEYS, Forgot, LeftOut, digest, forget, process, teach
from benchmarks.lib.report import RESULTS, setting, show, write
from mlx_parallm.extras.forgetting.forgotten import ForgetSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """What is forgotten, in words, and which trajectories that is."""

    what: str
    spec: ForgetSpec
    is_left_out: LeftOut


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60, help="Updates before anything is forgotten.")
    parser.add_argument("--choices", type=int, default=20, help="Random choices of what is forgotten.")
    parser.add_argument("--kills", type=int, default=20, help="Kills while a key is forgotten.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="8 updates, 2 choices, 2 kills.")
    parser.add_argument("--out", type=Path, default=RESULTS / "forget.json")
    args = parser.parse_args()
    if args.quick:
        args.updates, args.choices, args.kills = 8, 2, 2
    dice, described = random.Random(args.seed), machine.describe()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = small_model(folder / "model")
        taught_s = asyncio.run(_taught(model, folder / "taught", args.updates))
        key = Choice("a key of three", ForgetSpec(key=BOB), lambda one: one.owner == "bob")
        chosen = [key, *(_choice(dice, args.updates) for _ in range(args.choices))]
        rows = [(choice, *asyncio.run(_compared(model, folder, args.updates, choice))) for choice in chosen]
        killed, equal_after_kills = _killed(model, folder, args.updates, args.kills, dice)
    table = Table("forgotten", "updates made again", "first, s", "again, s", "equal to the bit")
    for choice, forgot, equal in rows:
        table.add_row(choice.what, str(forgot.again), f"{forgot.first_s:.2f}", f"{forgot.seconds:.2f}", str(equal))
    ratios = [forgot.seconds / forgot.first_s for _, forgot, _ in rows if forgot.first_s]
    figures = [
        _share("a key of three is forgotten, equal to the bit", [rows[0][2]]),
        _share("random choices, part equal to the bit", [equal for _, _, equal in rows[1:]]),
        _share("after kills, part equal to the bit", equal_after_kills),
        Figure("processes killed while they forgot", "", *reported([killed])),
        Figure("time to forget / time of the updates made again, at first", "x", *reported(ratios)),
    ]
    show(figures, table)
    record = {
        "machine": described,
        "setting": setting(args),
        "taught_s": taught_s,
        "choices": [{"what": choice.what, **asdict(forgot), "equal": equal} for choice, forgot, equal in rows],
    }
    write(args.out, record, figures)
    return 0 if all(figure.met is not False for figure in figures) else 1


def _share(name: str, equal: Sequence[bool]) -> Figure:
    """The part of the outcomes that is equal, which must be all."""
    return Figure(name, "", *reported([sum(equal) / len(equal)] if equal else []), limit=1.0, at_least=True)


def _choice(dice: random.Random, updates: int) -> Choice:
    kind = dice.choice(("trajectories", "trajectories", "time", "key"))
    if kind == "key":
        key = dice.choice(KEYS)
        return Choice(f"the key {key}", ForgetSpec(key=key), lambda one: one.owner == key)
    if kind == "time":
        first = dice.randrange(updates - 2)
        last = dice.randrange(first + 1, min(updates, first + 6))
        return Choice(
            f"updates {first} to {last - 1}",
            ForgetSpec(since=float(first), until=float(last)),
            lambda one: first <= one.created < last,
        )
    ids = tuple(
        f"traj-{dice.randrange(updates)}-{dice.choice(KEYS)}-{dice.randrange(4)}" for _ in range(dice.randint(1, 12))
    )
    return Choice(f"{len(ids)} trajectories", ForgetSpec(trajectory_ids=ids), lambda one: one.trajectory_id in ids)


async def _taught(model: Path, run: Path, updates: int) -> float:
    async with process(model, run) as training:
        return await teach(training, range(updates))


async def _compared(model: Path, folder: Path, updates: int, choice: Choice) -> tuple[Forgot, bool]:
    control, run = folder / "control", folder / "run"
    for old in (control, run):
        shutil.rmtree(old, ignore_errors=True)
    async with process(model, control) as training:
        await teach(training, range(updates), choice.is_left_out)
        expected = await digest(training)
    shutil.copytree(folder / "taught", run)
    async with process(model, run) as training:
        forgot = await forget(training, choice.spec)
        equal = await digest(training) == expected
    print(f"{choice.what}: {forgot.again} updates again in {forgot.seconds:.2f} s, equal: {equal}", flush=True)
    return forgot, equal


def _killed(model: Path, folder: Path, updates: int, kills: int, dice: random.Random) -> tuple[int, list[bool]]:
    """Kills processes that forget the key bob. Each run is killed up to three times, and ends by itself then.

    Returns:
        How many were killed before they had ended, and for each run whether its policy is equal in the end.
    """
    control = asyncio.run(_control(model, folder / "control", updates))
    outcomes: list[bool] = []
    killed, usual_s = 0, 2.0
    while killed < kills:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(folder / "taught", run)
        for _ in range(3):
            line, usual_s = _run_once(model, run, dice.uniform(0.0, usual_s), usual_s)
            killed += line == ""
        outcomes.append(_run_once(model, run, None, usual_s)[0] == control)
        print(f"{killed} killed; the policy is equal: {outcomes[-1]}", flush=True)
    return killed, outcomes


def _run_once(model: Path, run: Path, after: float | None, usual_s: float) -> tuple[str, float]:
    """Starts the process, and kills it so many seconds after it has begun to forget; None: waits for its end.

    Returns:
        The digest that it prints, empty if it was killed before; and how long it took, if it was not.
    """
    command = [sys.executable, "-m", "benchmarks.lib.forgetting.taught", str(model), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        assert started.stdout is not None
        started.stdout.readline()  # "ready"
        began = time.monotonic()
        if after is not None:
            time.sleep(after)
            started.send_signal(signal.SIGKILL)
        line = started.stdout.read().strip()
    return line, time.monotonic() - began if after is None else usual_s


async def _control(model: Path, run: Path, updates: int) -> str:
    shutil.rmtree(run, ignore_errors=True)
    async with process(model, run) as training:
        await teach(training, range(updates), lambda one: one.owner == "bob")
        return await digest(training)


if __name__ == "__main__":
    raise SystemExit(main())
