"""RLIntegratedServer as a Python program uses it: two coroutines, one model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from subprocess import Popen

import httpx
import pytest
from tiny import save_tiny

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import configure
from mlx_parallm.grammar import trial
from mlx_parallm.rl.service import TrainingService

LORA, RL = LoRAConfig(rank=4, alpha=8.0), RLConfig(learning_rate=1e-3, batch_size=4)
MARKED = {"collect_trajectory": True, "prompt": "abc", "n": 4, "max_tokens": 4, "seed": 1}


def make(tmp_path: Path, **keys: object) -> RLIntegratedServer:
    save_tiny("llama", tmp_path / "model")
    kept = tmp_path / "checkpoints"
    return RLIntegratedServer(
        tmp_path / "model", LORA, RL, server__kv_cache_memory="16MB", checkpointing__checkpoint_dir=kept, **keys
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(*coroutines, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of what these serve, until the block ends; they are cancelled then, as a program's Ctrl-C does."""
    both = asyncio.gather(*coroutines)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while not both.done():
                with suppress(httpx.ConnectError):
                    if (await client.get("/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
            assert not both.done(), both.exception()
            yield client
    finally:
        both.cancel()
        with suppress(asyncio.CancelledError):
            await both


def serving(server: RLIntegratedServer, trains: bool = True) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """A client of the server on a free port."""
    port = free_port()
    training = [server.run_training_loop()] if trains else []
    return running(server.run_inference(port=port), *training, port=port)


@pytest.mark.timeout(120)
async def test_both_coroutines_serve_and_train_one_model(tmp_path: Path) -> None:
    server, port = make(tmp_path), free_port()
    async with running(server.run_training_loop(), server.run_inference(port=port), port=port) as client:
        answer = (await client.post("/v1/completions", json=MARKED)).json()
        for at, trajectory in enumerate(answer["trajectory_ids"]):
            body = {"trajectory_id": trajectory, "score": float(at)}
            assert (await client.post("/v1/training/feedback", json=body)).status_code == 200
        while not (status := (await client.get("/v1/training/status")).json())["updates_total"]:
            await asyncio.sleep(0.02)
        assert status["current_lora"] == "default@1"
        after = (await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})).json()
        assert after["lora_adapter"] == "default@1"
    (line,) = map(json.loads, (tmp_path / "checkpoints/metrics.jsonl").read_text().splitlines())
    assert (line["kind"], line["adapter"], line["version"], line["step"]) == ("update", "default", 1, 1)
    assert line["reward_mean"] == status["reward_mean"]
    card = json.loads((tmp_path / "checkpoints/default/checkpoint-1/manifest.json").read_text())
    assert card["version"] == 1, "cancelled, it saves what it has learnt"
    while server._engine.processor.stats().alive:  # cancelled, it leaves no device thread behind
        await asyncio.sleep(0.02)


@pytest.mark.timeout(120)
async def test_the_base_model_answers_to_each_of_its_names(tmp_path: Path) -> None:
    async with serving(make(tmp_path, server__served_model_name=("one", "two", "three")), trains=False) as client:
        for name, status in {"one": 200, "two": 200, "three": 200, "four": 404}.items():
            answer = await client.post("/v1/completions", json={"model": name, "prompt": "abc", "max_tokens": 1})
            assert answer.status_code == status, answer.text


@pytest.mark.timeout(120)
def test_cancelled_again_and_again_it_leaves_no_device_thread(tmp_path: Path) -> None:
    """Though no thread is free for a while, and the event loop ends at once, as after Ctrl-C."""
    server, port, busy = make(tmp_path), free_port(), threading.Event()

    async def cancelled() -> None:
        serving = asyncio.create_task(server.run_inference(port=port))
        while not server._engine.processor.stats().ready:
            await asyncio.sleep(0.01)
        threads = ThreadPoolExecutor(1)
        threads.submit(busy.wait)
        asyncio.get_running_loop().set_default_executor(threads)
        for _ in range(50):
            serving.cancel()
            await asyncio.sleep(0.001)
        busy.set()

    asyncio.run(cancelled())
    assert not server._engine.processor.stats().alive


@pytest.mark.timeout(120)
async def test_the_first_request_after_ready_can_be_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = TrainingService.start_adapter

    async def slowly(self: TrainingService, name: str) -> None:
        await asyncio.sleep(0.5)
        await start(self, name)

    monkeypatch.setattr(TrainingService, "start_adapter", slowly)
    server, port = make(tmp_path), free_port()
    async with running(server.run_inference(port=port), server.run_training_loop(), port=port) as client:
        answer = await client.post("/v1/completions", json=MARKED)
        assert len(answer.json()["trajectory_ids"]) == 4


@pytest.mark.timeout(120)
async def test_a_server_without_training_runs_both_too(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    config = configure(tmp_path / "model", rl_training__enabled=False, server__kv_cache_memory="16MB")
    server, port = IntegratedServer(config), free_port()
    async with running(server.run_inference(port=port), server.run_training_loop(), port=port) as client:
        assert (await client.get("/v1/training/status")).json()["training_enabled"] is False
        assert (await client.post("/v1/completions", json=MARKED)).status_code == 409
        assert server._engine._served.training is None


@pytest.mark.timeout(120)
async def test_no_child_process_outlives_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = list[Popen[bytes]]()

    def begun(*arguments, **options) -> Popen[bytes]:
        children.append(Popen(*arguments, **options))
        return children[-1]

    monkeypatch.setattr(trial, "Popen", begun)
    server, port = make(tmp_path), free_port()
    async with running(server.run_inference(port=port), port=port) as client:
        body = {"prompt": "abc", "guided_regex": "a"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert [child.poll() for child in children] == [None], "it tries grammars"
    assert all(child.poll() is not None for child in children)
