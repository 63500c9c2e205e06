"""Does it learn? Real runs on the bundled model through the real server.

    python benchmarks/learning.py [--only sentiment ending gym control sums letters] [--seeds 0 1 2] [--resume]
                                  [--out FILE]

Each run starts a server with --enable-rl-training, draws groups over HTTP, has them rewarded (by the server's scorers,
or by feedback), and compares held-out prompts at temperature 1 before and after, 64 of them, seeds fixed. The control
gives random rewards; sums and letters are tried and only reported. Up to 8 minutes a run on two cores. Writes JSON, and
a PNG of the curves beside it, after each run; --resume keeps the runs that the file has, and makes the others.
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

import learning_run
import machine
import report
from figures import Figure, reported
from learning_run import Run
from learning_tasks import TASKS

HERE = Path(__file__).parent
SEEDS = {"sentiment": (0, 1, 2), "ending": (0, 1), "gym": (0, 1), "control": (0,), "sums": (0,), "letters": (0,)}
GAINS = {"sentiment": 0.5, "ending": 0.3, "gym": 0.2}
TRIED = ("sums", "letters")
"""Tasks of reasoning-gym that no gain is asked of."""
CONTROL_GAIN = 0.1
_RUN_FIELDS = {field.name for field in fields(Run)}
ERRORS = 3
"""A gain on the reasoning-gym task is at least so many standard errors."""


def main() -> int:
    """Exit code 0 when every run learnt what it was to learn, 1 when one did not."""
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
    report.show([], {}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _runs(arguments: argparse.Namespace, done: set[tuple[str, int]]) -> Iterator[Run]:
    """Those that are not done."""
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
    """Those that the file has, if it is of the same flags."""
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
    """The gain asked for (at most, of the control); None: only reported."""
    if run.task == TASKS["control"]().name:
        return CONTROL_GAIN
    if run.task in (TASKS[name]().name for name in TRIED):
        return None
    if run.task.startswith("reasoning_gym"):
        return max(GAINS["gym"], ERRORS * run.gain_error)
    return GAINS[run.task]


def _print_answers(run: Run) -> None:
    """What the served adapter itself said, before and after."""
    assert run.after is not None
    print(f"\n{run.task}, seed {run.seed}, served by {run.served_by}")
    for (prompt, then), (_, now) in zip(run.before.answers, run.after.answers, strict=True):
        question = prompt.partition("user\n")[2].partition("<|im_end|>")[0].replace("\n", " ")
        print(f"  {question[-90:]}\n    before: {then.strip()!r}\n    after:  {now.strip()!r}")


def _record(run: Run) -> dict[str, Any]:
    return {**asdict(run), "gain": run.gain, "gain_error": run.gain_error}


def _draw(runs: Sequence[Run], file: Path) -> None:
    """Mean reward of each update's groups, a line a run."""
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
    parser.add_argument("--out", type=Path, default=HERE / "results" / "learning.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
