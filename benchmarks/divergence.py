"""Makes training of the bundled model diverge on purpose, and counts the updates until it is noticed.

    python benchmarks/divergence.py [--only healthy kl_step kl entropy reward] [--steps 100] [--out FILE]

`mlx_parallm_train` runs on the task of `own_task.py`, with the default limits. `healthy`: 100 updates, which must raise
nothing. `kl_step`: the learning rate is 0.05, a hundred times too large. `kl` and `entropy`: the same without
the limits that would hold the updates before; the update that makes the policy diverge is not counted. `reward`: after
some healthy updates every answer gets the reward 0. About 45 minutes on two cores, most of them for `healthy`.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib import machine, report
from lib.figures import Figure, reported
from own_task import CONFIG, REWARDS, SPLIT, write_tasks

HERE = Path(__file__).parent
USUAL_RATE, WILD_RATE = 5e-4, 0.05
LIMIT, UPDATES, WILD_STEPS = 2, 100, 4
HEALTHY_STEPS = 8
"""Before the rewards collapse."""
TURN = "turned"
TURNED_REWARDS = (
    REWARDS
    + f'''

def turning(sample):
    """The reward, until there is a file `{TURN}`; then nothing is right."""
    from pathlib import Path

    return random.random() / 100 if Path({TURN!r}).exists() else score(sample)
'''
)
WITHOUT: Mapping[str, Sequence[str]] = {
    "kl_step": (),
    "kl": ("kl_step", "ratio", "entropy"),
    "entropy": ("kl_step", "ratio", "kl"),
}
"""Signals whose limits are lifted, so that the one that is looked for is reached."""
PARTS = ("healthy", *WITHOUT, "reward")


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `found`: the signals that diverged in each update. `seen`: how many of its updates, from the first one
    that could show the signal, it took until the signal was reported; None: it was not."""

    name: str
    found: list[list[str]]
    rewards: list[float | None]
    seen: int | None
    seconds: float


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    runs = [_measured(name, arguments.steps) for name in arguments.only]
    figures = list(_figures(runs))
    report.show(figures)
    record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is not True for figure in figures))


def _figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for run in runs:
        if run.name == "healthy":
            alarms = sum(map(len, run.found))
            yield Figure(f"alarms in {len(run.found)} healthy updates", "", *reported([alarms]), 0)
        else:
            seen = float("nan") if run.seen is None else run.seen
            yield Figure(f"{run.name}: updates until it is noticed", "", *reported([seen]), LIMIT)


def _measured(name: str, steps: int) -> Run:
    """Runs one part in a folder of its own. Its first update that can show the signal is 1."""
    print(name, flush=True)
    with tempfile.TemporaryDirectory(prefix="divergence_benchmark_") as place:
        folder = Path(place)
        (folder / "rewards.py").write_text(TURNED_REWARDS)
        lifted = "".join(f"    {signal}:\n      limit: null\n" for signal in WITHOUT.get(name, ()))
        (folder / "config.yaml").write_text(CONFIG + (f"  divergence:\n{lifted}" if lifted else ""))
        write_tasks(folder / "tasks.jsonl", slice(0, SPLIT), {})
        began = time.monotonic()
        if name == "healthy":
            _train(folder, steps, USUAL_RATE)
            first = 0
        elif name == "reward":
            _train(folder, HEALTHY_STEPS, USUAL_RATE)
            (folder / TURN).touch()
            _train(folder, HEALTHY_STEPS + WILD_STEPS, USUAL_RATE)
            first = HEALTHY_STEPS
        else:
            _train(folder, WILD_STEPS, USUAL_RATE)
            _train(folder, 2 * WILD_STEPS, WILD_RATE)
            first = WILD_STEPS if name == "kl_step" else WILD_STEPS + 1
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return _of(name, [line for line in lines if line["kind"] == "update"], first, time.monotonic() - began)


def _of(name: str, lines: Sequence[dict[str, Any]], first: int, seconds: float) -> Run:
    found = [line["divergences"] for line in lines]
    seen = next((number for number, signals in enumerate(found[first:], 1) if name in signals), None)
    return Run(name, found, [line.get("reward_mean") for line in lines], seen, seconds)


def _train(folder: Path, steps: int, rate: float) -> None:
    """Trains up to this step, and goes on where an earlier call has ended. A divergence may end it sooner."""
    flags = {
        "config": "config.yaml",
        "environment": "tasks.jsonl",
        "reward": "rewards.py:turning",
        "steps": steps,
        "max-tokens": 12,
        "learning-rate": rate,
        "checkpoint-dir": "run",
        "log": "metrics.jsonl",
    }
    command = [sys.executable, "-m", "mlx_parallm", "train"]
    command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    subprocess.run(command, cwd=folder, check=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=UPDATES, help="updates of the healthy run")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "divergence.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
