"""Measures how far the logprobs of sampler and trainer are apart, what that costs in reward, and what mends it.

    python benchmarks/studies/mismatch.py [--seeds 0 1 2] [--updates 8] [--only agreement families memory learning]
        [--arms NAME …] [--resume] [--out FILE]

The engine's own forward pass samples from the bundled model, the trainer scores the samples, and both use weights and
activations of several types (see `lib/mismatch/bases.py`): the difference of the log-probabilities of each token.
Gradients in bfloat16 are compared with those of the same weights in float32. Then runs learn to answer with one word
(`Verdict`, 4 prompts x 8 samples an update), with samplers that differ from the trainer, and with and without weights
that correct for it. A sampler whose weights were rounded once more, and one that is a version old, differ more than any
precision does.

It runs on a GPU as it is. JSON is written after each part; --resume keeps what the file has. It takes about 30 minutes
with one thread.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.mismatch import agreement, families, learning
from benchmarks.lib.mismatch.agreement import PAIRINGS, RANK, Agreement
from benchmarks.lib.mismatch.bases import BFLOAT16, FLOAT32, base
from benchmarks.lib.mismatch.families import FamilyError
from benchmarks.lib.mismatch.learning import ARMS, LearningRun
from mlx_parallm.app.training import footprint_of
from mlx_parallm.train.footprint import Footprint
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.packed_pass import SEGMENT

AGREEMENT, FAMILIES, MEMORY, LEARNING = PARTS = ("agreement", "families", "memory", "learning")
MOST_FLOAT32 = 1e-4
"""Nats that the log-probabilities of sampler and trainer may be apart in float32."""
MICRO_STEP, CONTEXT = 1024, 256


@dataclass(slots=True)
class Results:
    """What was measured. `memory`: MB of a micro-step of `MICRO_STEP` tokens, without layers computed again and with
    them, by the types of the base model and of the factors' products."""

    agreement: list[Agreement] = field(default_factory=list)
    families: list[FamilyError] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    runs: list[LearningRun] = field(default_factory=list)

    def runs_of(self, arm: str) -> list[LearningRun]:
        return [run for run in self.runs if run.arm == arm]


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    results = _earlier(arguments) if arguments.resume else Results()
    for done in _measured(arguments, results):
        print(done, flush=True)
        record = {"machine": before, "setting": _setting(arguments), **asdict(results)}
        report.write(arguments.out, record, _figures(results))
    if results.runs:
        _draw(results, arguments.out.with_suffix(".png"))
    figures = list(_figures(results))
    report.show(figures)
    return int(any(figure.met is False for figure in figures))


def _measured(arguments: argparse.Namespace, results: Results) -> Iterator[str]:
    """Measures what the results lack. Yields a line after each part."""
    if AGREEMENT in arguments.only:
        known = {each.name for each in results.agreement}
        for pairing in PAIRINGS:
            if pairing.name not in known:
                results.agreement.append(agreement.measured(pairing))
                yield str(results.agreement[-1])
    if FAMILIES in arguments.only and not results.families:
        results.families = [families.measured(name) for name in families.NAMES]
        yield str(results.families)
    if MEMORY in arguments.only and not results.memory:
        results.memory = dict(_memory())
        yield str(results.memory)
    if LEARNING in arguments.only:
        for seed in arguments.seeds:
            for arm in ARMS:
                made = any(run.seed == seed for run in results.runs_of(arm.name))
                if not made and (not arguments.arms or arm.name in arguments.arms):
                    run = learning.learnt(arm, seed, arguments.updates)
                    results.runs.append(run)
                    rewards = " ".join(f"{reward:.2f}" for reward in run.rewards)
                    yield f"{run.arm}, seed {seed}: {rewards}, {run.seconds:.0f} s"


def _memory() -> Iterator[tuple[str, list[float]]]:
    """From the graphs of the passes, which are not computed."""
    for kind in (FLOAT32, BFLOAT16):
        manager = base(kind, fast=False)
        bank = manager.install_bank(1, RANK)
        footprint = footprint_of(manager.model, manager.plan, bank)
        for dtype in dict.fromkeys((bank.dtype, mx.float32)):
            model = TrainableModel(manager.model, bank, manager.plan, lambda *_: True, SEGMENT)
            model.dtype = dtype
            footprint = Footprint.of(model, manager.plan.vocab_size)
            sizes = [footprint.micro_step_bytes(MICRO_STEP, CONTEXT, again) / 1e6 for again in (False, True)]
            yield f"{kind}, products {str(dtype).removeprefix('mlx.core.')}", sizes


def _figures(results: Results) -> Iterator[Figure]:
    for each in results.agreement:
        limit = MOST_FLOAT32 if each.name == "float32" else None
        yield Figure(f"{each.name}: mean difference of a logprob", "nats", *reported([each.mean]))
        yield Figure(f"{each.name}: its 99th percentile", "nats", *reported([each.percent99]))
        yield Figure(f"{each.name}: largest one", "nats", *reported([each.most]), limit)
        yield Figure(f"{each.name}: mismatch KL", "nats", *reported([each.kl]))
        yield Figure(f"{each.name}: tokens whose ratio leaves 0.8 to 1.25", "%", *reported([100 * each.outside]))
        if each.gradient_error is not None:
            name = f"{each.name}: error of the gradient"
            yield Figure(name, "%", *reported([100 * each.gradient_error]))
    for family in results.families:
        for dtype, value in (("bfloat16", family.bfloat16), ("float32", family.float32)):
            name = f"tiny {family.name} in bfloat16, products {dtype}: error of the gradient"
            yield Figure(name, "%", *reported([100 * value]))
    for name, (kept, again) in results.memory.items():
        yield Figure(f"{name}: memory of a micro-step of {MICRO_STEP} tokens", "MB", *reported([kept]))
        yield Figure(f"{name}: the same, layers computed again", "MB", *reported([again]))
    for arm in ARMS:
        if runs := results.runs_of(arm.name):
            count = len(runs[0].rewards)
            name = f"{arm.name}: mean reward of {count} updates, {len(runs)} seeds"
            yield Figure(name, "", *reported([mean(run.rewards) for run in runs]))
            yield Figure(f"{arm.name}: reward of the last three", "", *reported([run.last for run in runs]))
            mismatch = [update["mismatch_kl"] for run in runs for update in run.updates if "mismatch_kl" in update]
            yield Figure(f"{arm.name}: mismatch KL of an update", "nats", *reported(mismatch))


def _draw(results: Results, file: Path) -> None:
    """Mean reward by update, one line for each arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for arm in ARMS:
        if runs := results.runs_of(arm.name):
            curve = [mean(rewards) for rewards in zip(*(run.rewards for run in runs), strict=False)]
            axes.plot(range(1, len(curve) + 1), curve, label=f"{arm.name} ({len(runs)} seeds)", linewidth=1.3)
    axes.set(xlabel="update", ylabel="mean reward of its samples", ylim=(0, 1.02))
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _setting(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"updates": arguments.updates, "device": str(mx.default_device())}


def _earlier(arguments: argparse.Namespace) -> Results:
    """What the file has, if it was measured with the same setting."""
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"setting": None}
    if record["setting"] != _setting(arguments):
        return Results()
    return Results(
        [Agreement(**each) for each in record["agreement"]],
        [FamilyError(**each) for each in record["families"]],
        record["memory"],
        [LearningRun(**each) for each in record["runs"]],
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--updates", type=int, default=8, help="of each learning run")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], metavar="NAME", default=())
    parser.add_argument("--resume", action="store_true", help="keep what the file has")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "mismatch.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
