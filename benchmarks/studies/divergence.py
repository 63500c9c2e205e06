"""Makes training of the bundled model diverge on purpose, and counts the updates until it is noticed.

    python benchmarks/studies/divergence.py [--only healthy kl_step kl entropy reward] [--steps 100] [--out FILE]

`mlx_parallm_train` runs on the task of `own_task.py`, with the default limits. `healthy`: 100 updates, which must raise
nothing. The other parts begin with 8 such updates. Then: `kl_step`: the learning rate is 0.05, a hundred times too
large. `entropy`: only one word is rewarded, and little, until the model says nothing else. `reward`: no answer is
rewarded. `kl` begins with a warm-up, at a large learning rate, on an answer that the base model would never give.
Limits that would act before the one in question are lifted. Counted are the updates from the first one that shows it:
for `kl_step` and `reward` the first after the change, for `kl` the first after the warm-up, for `entropy` the first
whose entropy is below a tenth of the healthy updates' median. About 35 minutes on two cores, most of them for
`healthy`.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training.command import SPLIT, Line, logged, prepare, row, train
from benchmarks.lib.training.learning_tasks import questions
from benchmarks.studies.own_task import CONFIG, REWARDS

USUAL_RATE, WILD_RATE = 5e-4, 0.05
LIMIT, UPDATES = 2, 100
HEALTHY_STEPS = 8
CHANGED_STEPS = {"kl_step": 2, "entropy": 12, "reward": 4}
"""Updates after the change, at most."""
KL_STEPS, EXAMPLES, KL_RATE = 4, 40, 2e-3
TURN = "turned"
TURNED_REWARDS = (
    REWARDS
    + f'''

def turning(sample):
    """The reward, until there is a file `{TURN}`. Then what it says: hardly anything, by chance, or one word only."""
    from pathlib import Path

    file = Path({TURN!r})
    if not file.exists():
        return score(sample)
    if file.read_text() == "entropy":
        return 0.05 * (sample.text.strip().lower() == "positive")
    return random.random() / 100
'''
)
ABSURD = """
class Absurd:
    def tasks(self, seed):
        from mlx_parallm.rl.environments import environment

        return environment("tasks.jsonl", rewarded=True).tasks(seed)

    def examples(self, seed):
        for task in self.tasks(seed):
            words = "Parliament raster Lobster cement phones Tuesday affection jury"
            yield (*task.messages, {"role": "assistant", "content": words})
"""
WITHOUT: Mapping[str, Sequence[str]] = {
    "kl_step": (),
    "kl": ("kl_step", "ratio", "entropy", "reward"),
    "entropy": ("kl_step", "ratio", "kl", "reward"),
    "reward": ("entropy",),
}
"""Signals whose limits are lifted."""
PARTS = ("healthy", *WITHOUT)
SHOWN = ("reward_mean", "kl", "kl_step", "entropy", "ratio_mean", "completion_tokens")


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `found`: the signals that diverged in each update. `seen`: how many updates, from the first one that
    shows what was provoked, it took until that was reported; None: it was not."""

    name: str
    found: list[list[str]]
    metrics: list[dict[str, float]]
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
    """Runs one part in a folder of its own."""
    print(name, flush=True)
    with tempfile.TemporaryDirectory(prefix="divergence_benchmark_") as place:
        folder = Path(place)
        lifted = "".join(f"    {signal}:\n      limit: null\n" for signal in WITHOUT.get(name, ()))
        config = CONFIG + (f"  divergence:\n{lifted}" if lifted else "")
        if name in ("kl_step", "kl"):  # which updates that are moved back never provoke
            config += "  optimizer:\n    max_kl_step: null\n"
        prepare(folder, config, TURNED_REWARDS, [row(question) for question in questions(slice(0, SPLIT))])
        began = time.monotonic()
        if name == "healthy":
            _train(folder, steps, USUAL_RATE)
        elif name == "kl":
            (folder / "absurd.py").write_text(ABSURD)
            (folder / TURN).write_text(name)
            _train(folder, KL_STEPS, KL_RATE, {"environment": "absurd.py:Absurd", "warm-up": EXAMPLES})
        else:
            _train(folder, HEALTHY_STEPS, USUAL_RATE)
            if name != "kl_step":
                (folder / TURN).write_text(name)
            _train(folder, HEALTHY_STEPS + CHANGED_STEPS[name], WILD_RATE if name == "kl_step" else USUAL_RATE)
        updates = [line for line in logged(folder) if line["kind"] == "update"]
    return _of(name, updates, time.monotonic() - began)


def _of(name: str, lines: Sequence[Line], seconds: float) -> Run:
    found = [line["divergences"] for line in lines]
    metrics = [{figure: line[figure] for figure in SHOWN if figure in line} for line in lines]
    seen = next((number for number, signals in enumerate(found[_first(name, metrics) :], 1) if name in signals), None)
    return Run(name, found, metrics, seen, seconds)


def _first(name: str, metrics: Sequence[Mapping[str, float]]) -> int:
    """The index of the first update that shows what part `name` provokes."""
    if name == "kl":
        return sum("reward_mean" not in update for update in metrics)
    if name == "entropy":
        usual = median(update["entropy"] for update in metrics[:HEALTHY_STEPS])
        low = (at for at, update in enumerate(metrics) if update.get("entropy", usual) < usual / 10)
        return next(low, len(metrics))
    return HEALTHY_STEPS


def _train(folder: Path, steps: int, rate: float, more: Mapping[str, object] | None = None) -> None:
    """Trains up to this step, and goes on where an earlier call has ended. A divergence may end it sooner."""
    train(folder, {"reward": "rewards.py:turning", "steps": steps, "learning-rate": rate, **(more or {})})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=UPDATES, help="updates of the healthy run")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "divergence.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
