"""A process that trains and is killed, and the one after it: the same model, feedback and updates, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_tiny

_PROCESS = """
import asyncio, hashlib, json, os, signal, sys
from pathlib import Path
import numpy as np
from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.core import CollectionSpec, GenerationRequest, GivenTrajectory, RequestFinished, SamplingParams
from mlx_parallm.core import Edit, Signal, StopParams, WorkClass

def given(number):
    if number % 2:
        return [GivenTrajectory((5, 6), (8 + number + sample, 9, 2), None, "a", mask=(True, False, True),
                                advantages=(sample - 1.5, 0.0, 1 / 3)) for sample in range(4)]
    return [GivenTrajectory((5, 6), (8 + number + sample, 2), float(sample), "a") for sample in range(4)]

async def digest(training):
    weights = (await training.learner.snapshot(training.learner.state("default"))).weights
    content = b"".join(np.ascontiguousarray(leaf).tobytes() for name in sorted(weights.pairs)
                       for leaf in (weights.pairs[name].a, weights.pairs[name].b))
    return hashlib.sha256(content).hexdigest()

async def main(path, updates):
    server = RLIntegratedServer(
        path / "model", LoRAConfig(rank=4, alpha=8.0), RLConfig(learning_rate=1e-3, batch_size=1000),
        server__kv_cache_memory="16MB", checkpointing__checkpoint_dir=path / "run", checkpointing__interval=4,
    )
    async with server.session() as served:
        service = served.training.service
        found = {"digest": await digest(served.training), "current": str(service.status().current),
                 "step": service.status().step, "waiting": {}}
        for card in service.trajectories.newest(100):
            found["waiting"][card.trajectory.trajectory_id] = [card.state, card.reward]
        print(json.dumps(found), flush=True)
        for number in range(updates):
            # the edit of the round before, which the first round of a later process has from the journal
            await service.update(signal=Signal.PREFERENCES if number % 2 else Signal.CORRECTIONS, publish=False)
            report = await service.update(given=given(number))
            request = GenerationRequest(
                f"r{report.step}", ((5, 6),), SamplingParams(seed=number), StopParams(4), n=2,
                adapter=report.adapter, work_class=WorkClass.TRAINING, collection=CollectionSpec(),
            )
            async for event in served.generate(request):
                if isinstance(event, RequestFinished):
                    first = event.trajectory_ids[0]
            await service.people.feedback(first, number / 4, "ann")
            edit = await service.people.edit(Edit("default", (5, 6), (9 + number, 2), () if number % 2 else (7, 2)))
            answers = ["chosen"] if number % 2 else ["chosen", "rejected"]
            found["waiting"] = {one: of for one, of in found["waiting"].items() if one.startswith("traj-")}
            found["waiting"] |= {f"{edit.edit_id}-{which}": ["scored", float(which == "chosen")] for which in answers}
            found["waiting"] |= {first: ["scored", number / 4], event.trajectory_ids[1]: ["waiting", None]}
            found |= {"digest": await digest(served.training), "current": str(service.status().current),
                      "step": service.status().step}
            print(json.dumps(found), flush=True)
        if updates:
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
"""


@pytest.mark.timeout(240)
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def process(updates: int) -> list[dict[str, object]]:
        command = [sys.executable, "-c", _PROCESS, str(tmp_path), str(updates)]
        done = subprocess.run(command, env=environment, timeout=100, check=False, capture_output=True, text=True)
        assert done.returncode == (-signal.SIGKILL if updates else 0), done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    *_, before = process(2)
    first, *_, last = process(2)
    assert first == before, "made again from nothing, as there was no checkpoint"
    assert (last["step"], last["current"]) == (7, "default@4")
    (again,) = process(0)
    stale = {one for one in last["waiting"] if one in ("traj-r1-0", "traj-r1-1", "traj-r3-0", "traj-r3-1")}
    late = {"late-traj-r1-0": ["scored", -1.0], "late-traj-r3-0": ["scored", 1.0]}
    waiting = {one: of for one, of in last["waiting"].items() if one not in stale}
    assert again == {**last, "waiting": waiting | late}, "opinions of answers that are too old count as late ones"
    (resumed,) = process(0)
    assert resumed == again, "and a process that ends by itself leaves the same"
