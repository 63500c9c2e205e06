"""What is gained by drawing the rollouts of the next step while those of this one wait for a scorer or a tool.

    python benchmarks/studies/overlap.py [--only scorer tool neither] [--seeds 0 1] [--steps 20] [--wait 2]
        [--model-path DIR] [--out FILE]

`mlx_parallm_train` runs twice for each seed: taking turns (`draw_ahead_after_s: null`), and drawing ahead as it does by
default. In `scorer`, the reward of an answer comes after --wait seconds, in which its process sleeps; in `tool`, an
environment's tool sleeps so long between the two turns of an episode; in `neither`, nothing waits, and both should take
the same time. The two runs of a seed come one after the other, in turn the one and the other first. Compared is the
time of all steps, and the mean reward of the last five. About 20 minutes on two cores. A part that is not run again
keeps its runs in the file.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, ratios, reported
from benchmarks.lib.training.command import SPLIT, Line, checked, logged, prepare, row, train
from benchmarks.lib.training.learning_tasks import questions

KINDS = ("scorer", "tool", "neither")
GAIN, COST = 0.75, 1.0
"""Time of drawing ahead against taking turns, where something waits and where nothing does. Two runs of one command
differ by 3 % too."""

GROUPS = {"scorer": 1, "tool": 1, "neither": 4}
"""Prompts of a step. With one, a step takes about as long as the wait."""

GROUP_SIZE, TOKENS, CALL_TOKENS, LAST = 4, 8, 4, 5

CONFIG = """\
rl_training:
  algorithm: grpo
  gradient_checkpointing: false
  scoring_processes: {processes}
  draw_ahead_after_s: {after}
"""

CODE = '''\
import asyncio
import json
import random
import re

from mlx_parallm.core.requests import (CollectionSpec)
from mlx_parallm.rl.environments import Task


def reward_of(text, answer):
    """The right word's share of the answer, and a little for every short answer, so that most groups have a signal."""
    words = re.findall("[a-z]+", text.lower())
    return (0.9 * (answer in words) + 0.1) / len(words) if words else 0.0


async def score(sample):
    await asyncio.sleep({scorer})
    return reward_of(sample.text, sample.metadata["answer"])


class Tool:
    """Asks again after a tool has looked something up."""

    def tasks(self, seed):
        rows = [json.loads(line) for line in open("tasks.jsonl")]
        while True:
            for row in random.Random(seed).sample(rows, len(rows)):
                question = {{"role": "user", "content": row["prompt"]}}
                yield Task((question,), CollectionSpec(metadata={{"answer": row["answer"]}}))

    async def rollout(self, client, task):
        first = await client.ask(task.messages, max_tokens={call})
        await asyncio.sleep({tool})
        again = {{"role": "user", "content": "Others agree. So?"}}
        second = await client.ask([*task.messages, first.message, again])
        return reward_of(second.text, task.collection.metadata["answer"])
'''


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `seconds`: of each step. `staleness`: mean of its updates. `reward`: mean of the last updates."""

    kind: str
    seed: int
    ahead: bool
    seconds: list[float]
    staleness: float
    reward: float

    @property
    def total(self) -> float:
        return sum(self.seconds)


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine.warn_if_busy()
    before = machine.describe()
    runs = [run for run in _earlier(arguments.out) if run.kind not in arguments.only]
    runs += [
        _run(kind, seed, ahead, arguments)
        for kind in arguments.only
        for number, seed in enumerate(arguments.seeds)
        for ahead in ((False, True) if number % 2 == 0 else (True, False))
    ]
    kinds = [kind for kind in KINDS if any(run.kind == kind for run in runs)]
    figures = [figure for kind in kinds for figure in _figures(kind, runs)]
    report.show(figures)
    record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _earlier(file: Path) -> list[Run]:
    """The runs in the file."""
    return [Run(**run) for run in json.loads(file.read_text())["runs"]] if file.exists() else []


def _figures(kind: str, runs: Sequence[Run]) -> Iterator[Figure]:
    turns, ahead = (
        sorted((run for run in runs if run.kind == kind and run.ahead is way), key=lambda run: run.seed)
        for way in (False, True)
    )
    yield Figure(f"{kind}: all steps, taking turns", "s", *reported([run.total for run in turns]))
    yield Figure(f"{kind}: all steps, drawing ahead", "s", *reported([run.total for run in ahead]))
    ratio = ratios([run.total for run in ahead], [run.total for run in turns])
    yield Figure(f"{kind}: ratio", "", ratio, ratio.median, COST if kind == "neither" else GAIN)
    yield Figure(f"{kind}: staleness, drawing ahead", "versions", *reported([run.staleness for run in ahead]))
    yield Figure(f"{kind}: reward of the last {LAST} steps, taking turns", "", *reported([run.reward for run in turns]))
    yield Figure(
        f"{kind}: reward of the last {LAST} steps, drawing ahead", "", *reported([run.reward for run in ahead])
    )


def _run(kind: str, seed: int, ahead: bool, arguments: argparse.Namespace) -> Run:
    with tempfile.TemporaryDirectory(prefix="overlap_benchmark_") as name:
        folder = Path(name)
        config = CONFIG.format(processes=2 * GROUPS[kind], after="0.5" if ahead else "null")
        waits = {each: arguments.wait if kind == each else 0 for each in ("scorer", "tool")}
        code = CODE.format(**waits, call=CALL_TOKENS)
        tasks = (row(question, id=number) for number, question in enumerate(questions(slice(0, SPLIT))))
        prepare(folder, config, code, tasks)
        source = {"environment": "rewards.py:Tool"} if kind == "tool" else {"reward": "rewards.py:score"}
        model = {"model-path": Path(arguments.model_path).absolute()} if arguments.model_path else {}
        flags = {
            **source,
            **model,
            "steps": arguments.steps,
            "prompts-per-step": GROUPS[kind],
            "group-size": GROUP_SIZE,
            "max-tokens": TOKENS,
            "learning-rate": 3e-4,
            "seed": seed,
        }
        checked(train(folder, flags))
        return _of([line for line in logged(folder) if line["kind"] == "update"], kind, seed, ahead)


def _of(lines: Sequence[Line], kind: str, seed: int, ahead: bool) -> Run:
    staleness = [line["staleness"] for line in lines if "staleness" in line]
    rewards = [line["reward_mean"] for line in lines[-LAST:] if "reward_mean" in line]
    return Run(kind, seed, ahead, [line["seconds"] for line in lines], fmean(staleness), fmean(rewards))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wait", type=float, default=2.0)
    parser.add_argument("--model-path")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "overlap.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
