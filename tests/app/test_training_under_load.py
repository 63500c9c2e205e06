"""A whole engine on a tiny model, trained by the requests that it serves: a hundred updates beside eight clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from lora import layout_of, merged
from tiny import save_tiny, tiny_model

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.app.build import Served
from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import CollectionSpec, GenerationRequest, RequestFinished, SamplingParams, StopParams

CLIENTS, UPDATES = 8, 100
TEMPERATURE = 0.9
SAME = 2e-5
"""Of logprobs: those with which a version drew tokens beside other rows, and those of mlx-lm's model alone."""


async def complete(served: Served, number: int) -> None:
    """One collected request of whatever the route gives, with two answers that get a random reward."""
    with served.adapters.lease(None) as adapter:
        sampling = SamplingParams(seed=number, temperature=TEMPERATURE)
        prompt = (5, 6, 7 + number % 5)
        request = GenerationRequest(
            f"r{number}", (prompt,), sampling, StopParams(4), n=2, adapter=adapter, collection=CollectionSpec()
        )
        *_, end = [event async for event in served.generate(request)]
    assert isinstance(end, RequestFinished)
    for trajectory in end.trajectory_ids:
        await served.training.trajectories.feedback(trajectory, random.Random(trajectory).random())


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_hundred_updates_beside_eight_clients(tmp_path: Path) -> None:
    """Each answer was sampled with the weights of the version that it names, which are those of its checkpoint."""
    save_tiny("llama", tmp_path / "model")
    keys = {
        "server__kv_cache_memory": "16MB",
        "rl_training__update_frequency": 2 * CLIENTS,
        "rl_training__divergence__reward__limit": None,  # random rewards fall by chance
        "rl_training__trajectory_log": tmp_path / "log.jsonl",
        "checkpointing__checkpoint_dir": tmp_path / "run",
        "checkpointing__interval": 1,
        "checkpointing__keep_n_checkpoints": 2 * UPDATES,
        "debug__check_when_idle": True,
    }
    rl = RLConfig(algorithm="dapo", learning_rate=3e-3, max_staleness=4)
    server = RLIntegratedServer(tmp_path / "model", LoRAConfig(rank=4, alpha=8.0), rl, **keys)
    async with server.session() as served:
        numbers = itertools.count()

        async def client() -> None:
            """Asks no faster than the trainer learns, so that no answer is too old when its thumb comes."""
            while (status := served.training.status()).updates_total < UPDATES:
                if status.groups_ready < CLIENTS:
                    await complete(served, next(numbers))
                else:
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        assert not set(served.training.status().skips) - {"no_signal"}
    models = versions_in(tmp_path / "run") | {str(BASE_ADAPTER): tiny_model("llama")}
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len({line["adapter"] for line in lines}) > UPDATES / 2, "requests are served by each new version"
    for line in lines:
        prompt, drawn = line["prompt_token_ids"], line["completion_token_ids"]
        logits = models[line["adapter"]](mx.array([[*prompt, *drawn]]))[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs = mx.take_along_axis(logits, mx.array(drawn)[:, None], -1)[:, 0] - mx.logsumexp(logits, -1)
        assert line["sampling_logprobs"] == pytest.approx(logprobs.tolist(), abs=SAME)


def versions_in(run: Path) -> dict[str, nn.Module]:
    """mlx-lm's model with the weights of each checkpoint of a run, by the names of their versions."""
    layout, models = layout_of(tiny_model("llama")), {}
    for manifest in run.glob("default/checkpoint-*/manifest.json"):
        weights = read_adapter(manifest.parent, layout, 16).weights
        models[f"default@{json.loads(manifest.read_text())['version']}"] = merged(tiny_model("llama"), weights)
    return models
