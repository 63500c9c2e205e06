"""Trains on environments: a task with a tool, and a server that collects by itself while clients use it.

    python benchmarks/studies/environments.py [--only tool server] [--seeds 0 1] [--steps 12] [--updates 10]
        [--seconds 60] [--model-path DIR] [--out FILE]

`tool`: mlx_parallm_train on `calculator`, once without examples for one step, and once with 4 examples and --steps.
The control does the same with rewards by chance; its figures are of the rewards that it should have had.
`server`: 8 clients stream chats; first from a server that only serves, for --seconds, then from one that draws rollouts
of `words` by itself until it has made --updates, and then from the same one with its training paused, for --seconds.
The last two answer with the adapter that is trained, and their rates are compared. About 40 minutes for both. A part
that is not run again keeps its figures in the file. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import httpx

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, spread
from benchmarks.lib.load import Stream

EXAMPLES, CLIENTS, ENDS = 4, 8, 3
"""Examples of the warm-up, clients, and updates whose mean reward is taken at the beginning and at the end."""
GAIN, LIVE_SHARE = 0.3, 0.83
REWARDS = "rewards.txt"
START_S, STOP_S, SETTLE_S = 300, 120, 5
CHAT = {"messages": [{"role": "user", "content": "Tell me about a city."}], "max_tokens": 48, "stream": True}
CHAT |= {"stream_options": {"include_usage": True}, "model": "base-model"}


@dataclass(frozen=True, slots=True)
class ToolRun:
    """Mean rewards: of the model as it is, of the first steps after the warm-up, and of the last ones. `control`: what
    it learnt from were others, by chance."""

    seed: int
    control: bool
    untrained: float
    warmed_up: float
    trained: float


@dataclass(frozen=True, slots=True)
class ServedRun:
    """Mean rewards of the first and the last updates; tokens per second of all clients together: `alone` from a server
    without adapters, `beside` training, and with training `paused`."""

    seed: int
    first: float
    last: float
    alone: float
    beside: float
    paused: float


# ---- a tool --------------------------------------------------------------------------------------


ENVIRONMENT = f'''\
import random

from mlx_parallm.rl.environments.builtin import Calculator


class Logged(Calculator):
    """Appends each reward to a file."""

    async def rollout(self, client, task):
        reward = await super().rollout(client, task)
        with open("{REWARDS}", "a") as file:
            file.write(f"{{reward}}\\n")
        return reward


class Control(Logged):
    async def rollout(self, client, task):
        await super().rollout(client, task)
        return random.random()
'''


def tool_run(seed: int, control: bool, arguments: argparse.Namespace, folder: Path) -> ToolRun:
    environment = f"tool.py:{'Control' if control else 'Logged'}"

    def rewards(name: str, *flags: str) -> list[float]:
        """Of all episodes."""
        place = folder / f"{name}-{seed}-{control}"
        place.mkdir()
        (place / "tool.py").write_text(ENVIRONMENT)
        common = ["--environment", environment, "--max-tokens", "16", "--learning-rate", "5e-4", "--seed", str(seed)]
        _program("train", arguments, *common, *flags, "--checkpoint-dir", "run", folder=place)
        return [float(line) for line in (place / REWARDS).read_text().split()]

    untrained = rewards("untrained", "--steps", "1", "--prompts-per-step", "8")
    trained = rewards("trained", "--steps", str(arguments.steps), "--warm-up", str(EXAMPLES))
    ends = ENDS * len(trained) // arguments.steps
    return ToolRun(seed, control, fmean(untrained), fmean(trained[:ends]), fmean(trained[-ends:]))


# ---- a server ------------------------------------------------------------------------------------


def served_run(seed: int, arguments: argparse.Namespace, folder: Path) -> ServedRun:
    run = folder / f"served-{seed}"
    with _server(arguments, "--seed", str(seed)) as port:
        alone = asyncio.run(_tokens_per_second(port, _after(arguments.seconds)))
    flags = ["--enable-rl-training", "--environment", "words", "--update-frequency", "32", "--learning-rate", "1e-3"]
    config = folder / "words.yaml"
    config.write_text("rl_training:\n  max_completion_tokens: 8\n")
    flags += ["--config", str(config), "--checkpoint-dir", str(run), "--seed", str(seed)]
    with _server(arguments, *flags) as port:
        beside = asyncio.run(_tokens_per_second(port, lambda: len(_rewards(run)) >= arguments.updates))
        rewards = _rewards(run)
        httpx.post(f"http://127.0.0.1:{port}/v1/training/pause", timeout=STOP_S).raise_for_status()
        time.sleep(SETTLE_S)
        paused = asyncio.run(_tokens_per_second(port, _after(arguments.seconds)))
    return ServedRun(seed, fmean(rewards[:ENDS]), fmean(rewards[-ENDS:]), alone, beside, paused)


async def _tokens_per_second(port: int, ended: Callable[[], bool]) -> float:
    """Of `CLIENTS` clients that ask again and again, until `ended`."""
    began, tokens = time.perf_counter(), 0

    async def client(number: int) -> None:
        nonlocal tokens
        asked = 0
        while not ended():
            stream = Stream(port, {**CHAT, "seed": 1000 * number + asked})
            await stream.run()
            tokens, asked = tokens + stream.tokens, asked + 1

    await asyncio.gather(*map(client, range(CLIENTS)))
    return tokens / (time.perf_counter() - began)


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


# ---- processes -----------------------------------------------------------------------------------


@contextmanager
def _server(arguments: argparse.Namespace, *flags: str) -> Iterator[int]:
    """The port of a server, which is ready, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = _started("serve", arguments, "--port", str(port), *flags)
    try:
        end = time.monotonic() + START_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server does not start; its output is above")
            time.sleep(0.5)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _program(name: str, arguments: argparse.Namespace, *flags: str, folder: Path) -> None:
    """Runs it to its end."""
    process = _started(name, arguments, *flags, folder=folder)
    try:
        if process.wait():
            raise SystemExit(f"{name} ended with {process.returncode}; its output is above")
    finally:
        process.kill()


def _started(
    name: str, arguments: argparse.Namespace, *flags: str, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    model = ["--model-path", str(arguments.model_path.absolute())] if arguments.model_path else []
    return subprocess.Popen([sys.executable, "-m", "mlx_parallm", name, *model, *flags], cwd=folder)


def _rewards(run: Path) -> list[float]:
    """The mean reward of each update of a run so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record["reward_mean"] for record in records if record["kind"] == "update" and "reward_mean" in record]


# ---- figures -------------------------------------------------------------------------------------


def _figures(tools: Sequence[ToolRun], served: Sequence[ServedRun]) -> Iterator[Figure]:
    if tools:
        taught, control = ([run for run in tools if run.control is each] for each in (False, True))
        yield _least("tool: gain in reward", [run.trained - run.untrained for run in taught], "", GAIN)
        yield _least("tool: of it after the warm-up", [run.trained - run.warmed_up for run in taught], "", None)
        after = [run.trained - run.warmed_up for run in control]
        yield _least("tool, control: gain after the warm-up", after, "", None)
    if served:
        yield _least("server: gain in reward", [run.last - run.first for run in served], "", GAIN)
        yield _least("server: rate of live clients", [run.beside / run.paused for run in served], "x", LIVE_SHARE)
        without = [run.beside / run.alone for run in served]
        yield _least("server: against one without training and adapters", without, "x", None)


def _least(name: str, values: Sequence[float], unit: str, limit: float | None) -> Figure:
    """A figure that keeps to its limit if each of its values does."""
    found = spread(values)
    return Figure(name, unit, found, found.low, limit, at_least=True)


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    machine.warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="environments_benchmark_") as name:
        folder = Path(name)
        tools, served = _earlier(arguments.out, arguments.only)
        if "tool" in arguments.only:
            tools = [tool_run(*each, arguments, folder) for each in product(arguments.seeds, (False, True))]
        if "server" in arguments.only:
            served = [served_run(seed, arguments, folder) for seed in arguments.seeds]
    judged = list(_figures(tools, served))
    report.show(judged)
    record = {"tool": [asdict(run) for run in tools], "server": [asdict(run) for run in served]}
    report.write(arguments.out, {"machine": before, "setting": _setting(arguments), **record}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _earlier(file: Path, again: Sequence[str]) -> tuple[list[ToolRun], list[ServedRun]]:
    """The runs in the file, without the parts that are run again."""
    record = json.loads(file.read_text()) if file.exists() else {}
    kept = {part: runs for part, runs in record.items() if part not in again}
    return [ToolRun(**run) for run in kept.get("tool", [])], [ServedRun(**run) for run in kept.get("server", [])]


def _setting(arguments: argparse.Namespace) -> dict[str, object]:
    return {**report.setting(arguments), "model_path": str(arguments.model_path or "bundled")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("tool", "server"), default=("tool", "server"))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1))
    parser.add_argument("--steps", type=int, default=12, help="of the training run with the tool")
    parser.add_argument("--updates", type=int, default=10, help="of the server")
    parser.add_argument("--seconds", type=float, default=60, help="of serving alone")
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "environments.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
