"""Trains long after a task is solved, while other requests run, and checks that the reward stays high.

    python benchmarks/studies/stability.py [--seeds 0 1 2 3 4 5 6 7] [--rounds 40] [--at-once 2] [--resume] [--out FILE]

Each run starts a server with --enable-rl-training and samples rounds of 4 prompts x 8 samples over HTTP. The server's
scorers give rewards, and the server makes its updates by itself. Another client sends plain requests meanwhile, and
several runs go on at the same time. Each new version answers 24 held-out prompts at temperature 1; the last one answers
64. JSON is written after each run; --resume keeps the runs that the file has.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

from benchmarks.lib import machine, peers, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training import learning_run
from benchmarks.lib.training.learning_run import CONFIG, FLAGS, GROUP, PROMPTS
from benchmarks.lib.training.learning_tasks import Prompt, Verdict

SEEDS = tuple(range(8))
HELD_OUT, AT_THE_END = 24, 64
LEAST_AT_THE_END = 0.85
WORSE, LONGER = 0.15, 3
"""The live version may be worse than the best one by more than `WORSE` for at most `LONGER` updates in a row."""

PLAIN = {"model": "base", "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.7}
PAUSE_S = 1.0
"""Seconds between two plain requests."""

SHARE = ("--training-time-share", "0.8")
"""Training time share. It is high because this benchmark measures learning, not its cost for other requests."""
REQUEST_LIMIT_S = 300


@dataclass(slots=True)
class StableRun:
    """The results of one run. `versions`: each live version with its round and held-out reward. `rewards`: of each
    round."""

    seed: int
    before: float = 0.0
    after: float = 0.0
    rounds: int = 0
    seconds: float = 0.0
    plain_requests: int = 0
    versions: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def solved_in(self) -> int | None:
        """Rounds until a version had a held-out reward of 0.9; None if none had."""
        return next((version["round"] for version in self.versions if version["reward"] >= 0.9), None)

    @property
    def longest_fall(self) -> int:
        """Largest number of versions in a row that were worse than the best before them by more than `WORSE`."""
        longest = row = 0
        best = 0.0
        for version in self.versions:
            row = row + 1 if best - version["reward"] > WORSE else 0
            longest, best = max(longest, row), max(best, version["reward"])
        return longest


def main() -> int:
    """Returns the exit code: 0 if every run keeps to its limits, 1 if one does not or has no result."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    runs = _earlier(arguments.out) if arguments.resume else []
    asyncio.run(_all(arguments, before, runs))
    judged = list(_figures(runs))
    report.show(judged)
    print(f"written to {arguments.out}")
    missing = {*arguments.seeds} - {run.seed for run in runs}
    return int(bool(missing) or any(figure.met is False for figure in judged))


async def _all(arguments: argparse.Namespace, before: dict[str, object], runs: list[StableRun]) -> None:
    places = asyncio.Semaphore(arguments.at_once)

    async def one(seed: int) -> None:
        async with places:
            with tempfile.TemporaryDirectory(prefix="stability_benchmark_") as folder:
                try:
                    runs.append(await _run(seed, arguments.rounds, Path(folder)))
                except (httpx.HTTPError, OSError) as error:  # this server is gone; the other runs continue
                    print(f"seed {seed} has no result: {error!r}; make it again with --resume", file=sys.stderr)
                    return
            _write(arguments.out, before, runs)

    done = {run.seed for run in runs}
    await asyncio.gather(*(one(seed) for seed in arguments.seeds if seed not in done))


async def _run(seed: int, rounds: int, logs: Path) -> StableRun:
    """Makes one run on its own server. Raises RuntimeError if a request fails."""
    began = time.monotonic()
    config = logs / "config.yaml"
    config.write_text(CONFIG)
    async with peers.our_server(None, logs, [*FLAGS, *SHARE, "--seed", str(seed), "--config", str(config)]) as server:
        url = f"http://127.0.0.1:{server.port}"
        with server.awake():
            async with httpx.AsyncClient(base_url=url, timeout=REQUEST_LIMIT_S) as http:
                run = StableRun(seed)
                other = asyncio.create_task(_plain_requests(http, run))
                try:
                    await _Driver(http, run).learn(rounds)
                finally:
                    other.cancel()
                    with suppress(asyncio.CancelledError, httpx.HTTPError):
                        await other
    run.seconds = time.monotonic() - began
    return run


async def _plain_requests(http: httpx.AsyncClient, run: StableRun) -> None:
    """Sends one request after another to the base model."""
    while True:
        learning_run.checked(await http.post("/v1/completions", json=PLAIN))
        run.plain_requests += 1
        await asyncio.sleep(PAUSE_S)


class _Driver:
    """The requests of an RL program. It samples the next round when the server has finished with the last one."""

    def __init__(self, http: httpx.AsyncClient, run: StableRun) -> None:
        self._http = http
        self._run = run
        self._task = Verdict()

    async def learn(self, rounds: int) -> None:
        run, prompts = self._run, self._task.training(self._run.seed)
        run.before = await self._held_out(HELD_OUT)
        live = None
        for number in range(1, rounds + 1):
            drawn = enumerate(islice(prompts, PROMPTS), number * PROMPTS)
            await asyncio.gather(*(self._draw(prompt, at) for at, prompt in drawn))
            status = await learning_run.settled(self._http)
            run.rounds = number
            if (status["live_lora"], status["updates_total"]) != live:
                live = (status["live_lora"], status["updates_total"])
                await self._judge(number, status)
        run.after = await self._held_out(AT_THE_END)
        run.status = await learning_run.training_status(self._http)

    async def _judge(self, number: int, status: dict[str, Any]) -> None:
        reward = await self._held_out(HELD_OUT)
        shown = ("reward_mean", "step_scale", "kl", "entropy", "grad_norm", "ratio_max")
        figures = {name: status["metrics"].get(name) for name in shown}
        version = {"round": number, "version": status["live_lora"], "updates": status["updates_total"]}
        self._run.versions.append({**version, "reward": reward, "skips": status["skips"], "metrics": figures})
        trained = figures["reward_mean"] or 0.0
        print(f"  seed {self._run.seed}, round {number}: {status['live_lora']}, "
              f"held out {reward:.2f}, update's rewards {trained:.2f}", flush=True)  # fmt: skip

    async def _draw(self, prompt: Prompt, number: int) -> None:
        """Samples group number `number` of the run."""
        marks = {"collect_trajectory": True, "scoring_function": prompt.scorer, "metadata": prompt.metadata}
        await self._complete(prompt, n=GROUP, seed=(self._run.seed * 1000 + number) * GROUP, **marks)

    async def _held_out(self, count: int) -> float:
        prompts = self._task.held_out()[:count]
        answers = await asyncio.gather(*(self._complete(prompt, n=1, seed=at) for at, prompt in enumerate(prompts)))
        texts = [answer["choices"][0] for answer in answers]
        return mean(
            self._task.rewarded(prompt, choice["text"], choice["finish_reason"] == "stop")
            for prompt, choice in zip(prompts, texts, strict=True)
        )

    async def _complete(self, prompt: Prompt, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt.text, "max_tokens": self._task.max_tokens, "temperature": 1.0, **fields}
        return dict(learning_run.checked(await self._http.post("/v1/completions", json=body)))


def _figures(runs: Sequence[StableRun]) -> Iterator[Figure]:
    for run in sorted(runs, key=lambda run: run.seed):
        name = f"seed {run.seed}"
        yield Figure(f"{name}: rounds until held-out reward 0.9", "", *reported([run.solved_in or float("nan")]))
        yield Figure(
            f"{name}: held-out reward after {run.rounds} rounds", "", *reported([run.after]), LEAST_AT_THE_END, True
        )
        name = f"{name}: versions in a row worse than the best by more than {WORSE:g}"
        yield Figure(name, "", *reported([run.longest_fall]), LONGER)


def _write(file: Path, before: dict[str, object], runs: Sequence[StableRun]) -> None:
    record = {"machine": before, "flags": [*FLAGS, *SHARE], "config": CONFIG, "runs": [asdict(run) for run in runs]}
    report.write(file, record, _figures(runs))


def _earlier(file: Path) -> list[StableRun]:
    """The runs in the file, if they were made with the same flags."""
    record = json.loads(file.read_text()) if file.exists() else {"flags": None, "runs": []}
    return [StableRun(**run) for run in record["runs"]] if record["flags"] == [*FLAGS, *SHARE] else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=2, help="runs that go on beside each other")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file has")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "stability.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
