"""Scorers of a user's package that do whatever scorers do, and groups for them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory

SHORT_S = 2.0
LONG_S = 60.0

SOURCE = '''
import json, os, re, subprocess, sys, time

def size(sample):
    return len(sample.text)

def seen(sample):
    assert (sample.prompt_tokens, sample.completion_tokens) == (2, 4)
    return {"stop": 1, "length": 2}[sample.finish_reason] + sample.metadata["bonus"]
seen.requires = ("bonus",)

def throws(sample):
    raise KeyError("no such thing")

def exits(sample):
    raise SystemExit(0)

def vanishes(sample):
    os._exit(3)

def not_finite(sample):
    return float(sample.text)

def word(sample):
    return "1.0"

def sleeps(sample):
    time.sleep(1000)

def starts_another(sample):
    """Hangs with a process of its own."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(sample.metadata["folder"] + "/other.new", "w") as file:
        file.write(str(other.pid))
    os.rename(sample.metadata["folder"] + "/other.new", sample.metadata["folder"] + "/other")
    time.sleep(1000)

def holds_the_gil(sample):
    re.match(r"(a+)+$", "a" * 60 + "b")

def prints(sample):
    print("not a reward")
    print(json.dumps({"id": 1, "rewards": [99.0]}), flush=True)
    os.write(1, b"nor this\\n")
    subprocess.run(["echo", "nor that"], check=True)
    return float(sys.stdin.read() == "")

def vandal(sample):
    for number in range(3, 64):
        try:
            os.write(number, b"{]\\n")
        except OSError:
            pass
    return 1.0

def waits(sample):
    """Says who it is, and waits to be let go."""
    folder = sample.metadata["folder"]
    with open(folder + "/pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(folder + "/pid.new", folder + "/pid")
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    return 7.0

def busy(sample):
    with open(sample.metadata["folder"] + "/pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sample.metadata["folder"] + "/pid.new", sample.metadata["folder"] + "/pid")
    holds_the_gil(sample)

def pid(sample):
    return os.getpid()

def nice(sample):
    return os.nice(0)

def mlx(sample):
    import mlx_parallm
    return float("mlx.core" in sys.modules or mlx_parallm.BLAS.fast)
'''
NAMES = [
    "size",
    "seen",
    "throws",
    "exits",
    "vanishes",
    "not_finite",
    "word",
    "sleeps",
    "holds_the_gil",
    "prints",
    "starts_another",
]
NAMES += ["vandal", "waits", "busy", "pid", "nice", "mlx", "absent"]


def group(scorer, *texts, finish_reason=FinishReason.STOP, client="", **metadata):
    return [
        Trajectory(
            trajectory_id=f"t{index}",
            group_id="g",
            group_size=len(texts),
            adapter=AdapterRef("tone", 1),
            prompt_ids=(1, 2),
            completion_ids=(3, 4, 5, 6),
            sampling_logprobs=(-1.0,) * 4,
            temperature=1.0,
            text=text,
            finish_reason=finish_reason,
            collection=CollectionSpec(scorer, metadata, client),
            created=0.0,
        )
        for index, text in enumerate(texts)
    ]


async def file_of(folder: Path, name: str) -> str:
    while not (folder / name).exists():
        await asyncio.sleep(0.01)
    return (folder / name).read_text()


async def gone(pid: int) -> None:
    """A process that is dead, a zombie perhaps."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if (state := Path(f"/proc/{pid}/stat")).exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        await asyncio.sleep(0.02)
