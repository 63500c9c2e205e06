"""Trains the bundled model on a task with partial credit, many times: how many of the runs learn it?

    python benchmarks/studies/partial_credit.py [--seeds 0 1 2 …] [--http-seeds 0 …] [--command-seeds 0 1 …]
        [--updates 20] [--resume] [--out FILE]

"Say only the word w." earns 1 for the word alone and 0.3 for an answer that contains it; answers are cut off at 8
tokens, so a policy that writes on after the word earns 0.3 with every answer, which teaches nothing. All runs have the
default algorithm, and updates of 4 prompts with 8 samples each. A run of `--http-seeds` gives a server feedback; one of
`--seeds` makes the same updates in this process, with a plain sampler and without a server, and takes half the time;
one of `--command-seeds` is `mlx_parallm_train` with a file of tasks and a file with the reward. A run ends early once
two updates in a row earn 0.9 (over HTTP: three 0.95). Settings are changed by environment variables, which the record
names. About 3 minutes for each run on two cores.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import httpx
import numpy as np

from benchmarks.lib import machine, peers, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training import command
from benchmarks.lib.training.in_process import InProcess, Sampler
from benchmarks.lib.training.learning_run import GROUP, PROMPTS, Client, Run, learn
from benchmarks.lib.training.learning_tasks import WORDS, OneWord, Prompt
from mlx_parallm.config import ModelConfig, RLTrainingConfig

LEARNT = 0.9
"""A run has learnt the task if an update's mean reward is at least this."""
HELD = 2
"""A run ends early after so many updates in a row with it."""

CONFIG = {"rl_training": {"gradient_checkpointing": False}}
RATE, RANK = "5e-4", "16"
FLAGS = (
    *("--enable-rl-training", "--lora-rank", RANK, "--learning-rate", RATE),
    *("--update-frequency", str(GROUP * PROMPTS), "--max-decode-stall-ms", "3000"),
)
KEPT = ("reward_mean", "kl_step", "entropy", "completion_tokens", "step_scale", "grad_norm")
"""Metrics of an update that the record keeps."""

REWARDS = '''\
import re


def score(sample):
    """1 for the word alone, 0.3 for an answer that contains it."""
    words = re.findall("[a-z]+", sample.text.lower())
    if sample.metadata["answer"] not in words:
        return 0.0
    return 1.0 if len(words) == 1 and sample.finish_reason == "stop" else 0.3
'''


@dataclass(frozen=True, slots=True)
class Learnt:
    """One run. `updates`: the outcome and the metrics `KEPT` of each."""

    way: str
    seed: int
    updates: list[dict[str, Any]]
    seconds: float

    @property
    def best(self) -> float:
        return max((update["reward_mean"] for update in self.updates if "reward_mean" in update), default=0.0)

    @property
    def until_learnt(self) -> int | None:
        """Number of the first update whose mean reward is `LEARNT`; None: there is none."""
        rewards = [update.get("reward_mean", 0.0) for update in self.updates]
        return next((number for number, reward in enumerate(rewards, start=1) if reward >= LEARNT), None)


def main() -> int:
    """Returns the exit code: 0 if every run has learnt the task, 1 if one has not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    runs = _earlier(arguments) if arguments.resume else []
    for run in _runs(arguments, {(run.way, run.seed) for run in runs}):
        runs.append(run)
        shown = f"in update {run.until_learnt}" if run.until_learnt else "not"
        print(
            f"{run.way}, seed {run.seed}: learnt {shown}, best {run.best:.2f}, {run.seconds / 60:.1f} min", flush=True
        )
        record = {"machine": before, "setting": _setting(arguments), "runs": [asdict(each) for each in runs]}
        report.write(arguments.out, record, _figures(runs))
    figures = list(_figures(runs))
    report.show(figures)
    return int(any(figure.met is False for figure in figures))


def _runs(arguments: argparse.Namespace, done: set[tuple[str, int]]) -> Iterator[Learnt]:
    """The runs that the record does not have yet."""
    rigs: list[tuple[InProcess, Sampler]] = []  # made once
    for way, seeds, run in (
        ("in process", arguments.seeds, partial(_in_process, rigs)),
        ("http", arguments.http_seeds, _by_http),
        ("command", arguments.command_seeds, _by_command),
    ):
        for seed in seeds:
            if (way, seed) not in done:
                with tempfile.TemporaryDirectory(prefix="partial_credit_benchmark_") as folder:
                    began = time.monotonic()
                    updates = run(seed, arguments, Path(folder))
                    yield Learnt(way, seed, updates, time.monotonic() - began)


def _in_process(
    rigs: list[tuple[InProcess, Sampler]], seed: int, arguments: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    if not rigs:
        rigs.append((_rig(), Sampler()))
    (rig, sampler), task, key, updates, solved = rigs[0], OneWord(arguments.updates), mx.random.key(seed), [], 0
    rig.restart(seed)
    prompts = _of_one_length(task.training(seed), sampler)
    while len(updates) < arguments.updates and solved < HELD:
        sampler.put(rig.policy.params, rig.policy.scale)
        key, dice = mx.random.split(key)
        asked = list(islice(prompts, PROMPTS))
        answers = sampler.sample([prompt.text for prompt in asked], GROUP, task.max_tokens, dice)
        rewards = [
            [task.rewarded(prompt, each.text, each.ended) for each in group]
            for prompt, group in zip(asked, answers, strict=True)
        ]
        outcome = rig.update(list(zip(answers, rewards, strict=True)))
        mean = float(np.mean(rewards))
        metrics = {} if outcome is None else outcome.metrics
        events, rig.events = rig.events, []
        updates.append({**_kept({**metrics, "reward_mean": mean}, "made" if outcome else "skipped"), "events": events})
        print(f"  seed {seed}: update {len(updates)}, reward {mean:.2f}, {', '.join(events)}", flush=True)
        solved = solved + 1 if mean >= LEARNT else 0
    return updates


def _rig() -> InProcess:
    """With the settings of the runs over HTTP."""
    training = {"optimizer": {"learning_rate": float(RATE)}, "update_frequency": GROUP * PROMPTS}
    config = RLTrainingConfig.model_validate({**CONFIG["rl_training"], **training})
    return InProcess(config, ModelConfig(lora_rank=int(RANK)))


def _of_one_length(prompts: Iterator[Prompt], sampler: Sampler) -> Iterator[Prompt]:
    """Those with as many tokens as most, which can be sampled in one batch."""
    counts = Counter(len(sampler.tokenizer.encode(OneWord.prompt(word).text)) for word in WORDS)
    ((usual, _),) = counts.most_common(1)
    return (prompt for prompt in prompts if len(sampler.tokenizer.encode(prompt.text)) == usual)


def _by_http(seed: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    return asyncio.run(_by_feedback(seed, arguments, folder))


async def _by_feedback(seed: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    config = folder / "config.yaml"
    config.write_text(json.dumps(CONFIG))
    task = OneWord(arguments.updates)
    flags = [*FLAGS, "--seed", str(seed), "--config", str(config), "--checkpoint-dir", str(folder / "run")]
    run = Run(task.name, seed, before=None)
    async with (
        peers.our_server(None, folder, flags) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=600) as http,
    ):
        await learn(Client(http, task, seed), task, seed, run, until=float("inf"))
    return [_kept(update["metrics"], update["outcome"]) for update in run.updates]


def _by_command(seed: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    tasks = [{"prompt": f"Say only the word {word}.", "answer": word} for word in WORDS]
    command.prepare(folder, json.dumps(CONFIG), REWARDS, tasks)
    flags = {"reward": "rewards.py:score", "steps": arguments.updates, "seed": seed, "max-tokens": OneWord.max_tokens}
    flags |= {"learning-rate": RATE, "lora-rank": RANK, "prompts-per-step": PROMPTS, "group-size": GROUP}
    command.checked(command.train(folder, flags, until=_solved))
    return [_kept(line, line["status"]) for line in _updates(command.logged(folder))]


def _solved(lines: Sequence[command.Line]) -> bool:
    last = [line.get("reward_mean", 0.0) for line in _updates(lines)][-HELD:]
    return len(last) == HELD and min(last) >= LEARNT


def _updates(lines: Sequence[command.Line]) -> list[command.Line]:
    return [line for line in lines if line["kind"] in ("update", "skipped", "held")]


def _kept(metrics: Mapping[str, Any], outcome: str) -> dict[str, Any]:
    return {"outcome": outcome, **{name: metrics[name] for name in KEPT if name in metrics}}


def _setting(arguments: argparse.Namespace) -> dict[str, Any]:
    changed = {name: value for name, value in sorted(os.environ.items()) if name.startswith("MLX_PARALLM_")}
    return {"flags": FLAGS, "config": CONFIG, "changed": changed, "updates": arguments.updates}


def _earlier(arguments: argparse.Namespace) -> list[Learnt]:
    """The runs in the record, if they were made with the same settings."""
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"setting": None, "runs": []}
    same = record["setting"] == json.loads(json.dumps(_setting(arguments)))
    return [Learnt(**run) for run in record["runs"]] if same else []


def _figures(runs: Sequence[Learnt]) -> Iterator[Figure]:
    for way in ("in process", "http", "command"):
        mine = [run for run in runs if run.way == way]
        learnt = [run.until_learnt for run in mine if run.until_learnt]
        if mine:
            yield Figure(f"{way}: runs that have learnt", "", *reported([len(learnt)]), len(mine), at_least=True)
            yield Figure(f"{way}: best reward of an update", "", *reported([run.best for run in mine]))
            yield Figure(f"{way}: updates until {LEARNT}", "", *reported(learnt))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=tuple(range(10)))
    parser.add_argument("--http-seeds", type=int, nargs="*", default=(0,))
    parser.add_argument("--command-seeds", type=int, nargs="*", default=tuple(range(5)))
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="keep the runs that the record has, and make the others")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "partial_credit.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
