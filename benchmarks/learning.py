"""Trains the bundled model on several tasks through a real server, and compares rewards before and after.

    python benchmarks/learning.py [--only sentiment ending hint gym control sums letters] [--seeds 0 1 2] [--resume]
                                  [--out FILE]

Each run starts a server with --enable-rl-training, samples groups over HTTP, and gets rewards from the server's scorers
or by feedback. It compares the rewards of 64 held-out prompts at temperature 1, with fixed seeds, before and after. The
task hint has episodes of two turns. The control task gives random rewards. The tasks sums and letters have no limit and
are only reported. A run takes up to 8 minutes on two cores. After each run, JSON and a PNG of the curves are written;
--resume keeps the runs that the file has and makes the others.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training import learning_run
from benchmarks.lib.training.learning_run import Run
from benchmarks.lib.training.learning_tasks import TASKS

SEEDS = {
    "sentiment": (0, 1, 2),
    "ending": (0, 1),
    "hint": (0, 1),
    "gym": (0, 1),
    "control": (0,),
    "sums": (0,),
    "letters": (0,),
}
GAINS = {"sentiment": 0.5, "ending": 0.3, "hint": 0.3, "gym": 0.2}
TRIED = ("sums", "letters")
"""Tasks of reasoning-gym whose gain has no limit."""
CONTROL_GAIN = 0.1
_RUN_FIELDS = {field.name for field in fields(Run)}
ERRORS = 3
"""Least gain on the reasoning-gym task, in standard errors."""


def main() -> int:
    """Returns the exit code: 0 if every run keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    machine.warn_if_busy()
    runs = _earlier(arguments.out) if arguments.resume else []
    for done in _runs(arguments, {(run.task, run.seed) for run in runs}):
        runs.append(done)
        _write(arguments.out, before, runs)
    judged = list(_figures(runs))
    for run in runs:
        _print_answers(run)
    report.show(judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _runs(arguments: argparse.Namespace, done: set[tuple[str, int]]) -> Iterator[Run]:
    """The runs that the file does not have yet."""
    for name in arguments.only:
        task = TASKS[name]()
        for seed in SEEDS[name] if arguments.seeds is None else arguments.seeds:
            if (task.name, seed) in done:
                continue
            with tempfile.TemporaryDirectory(prefix="learning_benchmark_") as folder:
                run = asyncio.run(learning_run.run(TASKS[name](), seed, Path(folder)))
            assert run.after is not None
            print(
                f"{run.task}, seed {run.seed}: {run.before.mean:.2f} -> {run.after.mean:.2f} "
                f"in {len(run.updates)} updates, {run.seconds / 60:.1f} min",
                flush=True,
            )
            yield run


def _earlier(file: Path) -> list[Run]:
    """The runs in the file, if they were made with the same flags."""
    record = json.loads(file.read_text()) if file.exists() else {"flags": None, "runs": []}
    if record["flags"] != list(learning_run.FLAGS):
        return []
    return [Run.of({key: value for key, value in run.items() if key in _RUN_FIELDS}) for run in record["runs"]]


def _write(file: Path, machine_before: dict[str, object], runs: Sequence[Run]) -> None:
    record = {"machine": machine_before, "flags": learning_run.FLAGS, "runs": [_record(run) for run in runs]}
    report.write(file, record, _figures(runs))
    _draw(runs, file.with_suffix(".png"))


def _figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for run in runs:
        assert run.after is not None
        name = f"{run.task}, seed {run.seed}"
        yield Figure(f"{name}: held-out reward before", "", *reported([run.before.mean]))
        yield Figure(f"{name}: held-out reward after", "", *reported([run.after.mean]))
        control = run.task == TASKS["control"]().name
        yield Figure(f"{name}: gain", "", *reported([run.gain]), _wanted(run), at_least=not control)
        yield Figure(f"{name}: minutes", "", *reported([run.seconds / 60]), learning_run.LIMIT_S / 60)


def _wanted(run: Run) -> float | None:
    """The limit of the run's gain: an upper one for the control, a lower one for the others. None if there is no
    limit."""
    if run.task == TASKS["control"]().name:
        return CONTROL_GAIN
    if run.task in (TASKS[name]().name for name in TRIED):
        return None
    if run.task.startswith("reasoning_gym"):
        return max(GAINS["gym"], ERRORS * run.gain_error)
    return GAINS[run.task]


def _print_answers(run: Run) -> None:
    """Prints some answers to held-out prompts before and after training."""
    assert run.after is not None
    print(f"\n{run.task}, seed {run.seed}, served by {run.served_by}")
    for (prompt, then), (_, now) in zip(run.before.answers, run.after.answers, strict=True):
        question = prompt.partition("user\n")[2].partition("<|im_end|>")[0].replace("\n", " ")
        print(f"  {question[-90:]}\n    before: {then.strip()!r}\n    after:  {now.strip()!r}")


def _record(run: Run) -> dict[str, Any]:
    return {**asdict(run), "gain": run.gain, "gain_error": run.gain_error}


def _draw(runs: Sequence[Run], file: Path) -> None:
    """Plots the mean reward of each update's groups, with one line per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for run in runs:
        rewards = [update["metrics"].get("reward_mean") for update in run.updates]
        axes.plot(range(1, len(rewards) + 1), rewards, label=f"{run.task}, seed {run.seed}", linewidth=1.2)
    axes.set(xlabel="update", ylabel="mean reward of the groups", ylim=(-0.02, 1.02))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(TASKS), default=tuple(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, help="in place of each task's own")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file has")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "learning.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
