"""Cached prefixes on the disk: a server that starts again has them, and no request waits for the disk for long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

import mlx.nn as nn
import pytest
from harness import TINY, Harness, Inline, assert_same_tokens, make_harness, solo
from lora import random_adapter
from tiny import RECURRENT, tiny_model

from mlx_parallm.adapters.weights import VersionInfo
from mlx_parallm.core.device import PauseMode
from mlx_parallm.core.requests import RequestFailed, RequestFinished
from mlx_parallm.engine import disk_prefixes
from mlx_parallm.kv.disk import PrefixStore
from mlx_parallm.model.cache_plan import prepare

PROMPT = random.Random(1).choices(range(256), k=300)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_model("llama")


class Later(Executor):
    """Runs what it is given when `run` is called."""

    def __init__(self) -> None:
        self.queue: list[tuple[Future, Callable]] = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.queue.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        while self.queue:
            future, call = self.queue.pop(0)
            if future.set_running_or_notify_cancel():
                future.set_result(call())


def server(
    folder: Path, model: nn.Module, fingerprint: str = "model", worker: Executor | None = None, **switches
) -> Harness:
    layout = prepare(model).layout
    made: list[Harness] = []
    store = PrefixStore(
        folder,
        fingerprint,
        layout,
        1 << 30,
        worker or Inline(),
        lambda: [harness.wakes.append(None) for harness in made],
    )
    made.append(make_harness(model, prefix_store=store, **switches))
    return made[0]


def ask(harness: Harness, prompt: list[int], name: str = "x", **fields) -> int:
    """Answers a prompt. Returns how many of its tokens were not computed."""
    before = harness.loop.counters.prefilled_tokens
    harness.answer(name, prompt, 8, **fields)
    assert isinstance(harness.terminal(name), RequestFinished)
    return len(prompt) - (harness.loop.counters.prefilled_tokens - before)


def detail(harness: Harness) -> dict:
    return harness.loop.stats().detail["prefix_cache_dir"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "deepseek_v3", *RECURRENT])
def test_after_a_restart_a_prompt_is_read_back_and_gives_the_same_tokens(tmp_path, family) -> None:
    model = tiny_model(family)
    assert ask(server(tmp_path, model), PROMPT) == 0
    again = server(tmp_path, model)
    assert ask(again, PROMPT) == 256
    assert_same_tokens(again.tokens("x"), solo(model, PROMPT, 8), TINY)
    stats = again.loop.stats()
    assert stats.prefix_cache_hits_total == 256
    assert (stats.external_prefix_cache_queries_total, stats.external_prefix_cache_hits_total) == (256, 256)


def test_a_long_prompt_is_read_in_parts(tmp_path, llama, monkeypatch) -> None:
    monkeypatch.setattr(disk_prefixes, "_PART_BYTES", 1)
    ask(server(tmp_path, llama), PROMPT)
    again = server(tmp_path, llama)
    assert ask(again, [*PROMPT[:200], *PROMPT]) == 192
    assert ask(again, PROMPT, "y") == 256
    stats = again.loop.stats()
    assert stats.external_prefix_cache_hits_total == 256
    assert stats.external_prefix_cache_queries_total == 448 + 64, "without the blocks in memory"


@pytest.fixture(scope="module", params=["lfm2", "mamba"])
def recurrent(request: pytest.FixtureRequest) -> nn.Module:
    """A model with attention beside its recurrent layers, and one without."""
    return tiny_model(request.param)


def files_of_states(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if b'"layers.0.0"' in path.read_bytes()]


def in_one_chunk(folder: Path, model: nn.Module, **switches) -> Harness:
    """A server whose chunks end only where a state is wanted."""
    return server(folder, model, max_batched_tokens=512, **switches)


def test_a_recurrent_prompt_goes_on_from_the_last_state_on_the_disk(tmp_path, recurrent) -> None:
    first = in_one_chunk(tmp_path, recurrent)
    ask(first, PROMPT[:140])
    assert (len(list(tmp_path.iterdir())), len(files_of_states(tmp_path))) == (3, 1)
    assert ask(first, PROMPT, "y") == 128
    assert (len(list(tmp_path.iterdir())), len(files_of_states(tmp_path))) == (6, 2)
    again = in_one_chunk(tmp_path, recurrent)
    for name, prompt, found, read in (("x", PROMPT[:250], 128, 128), ("y", PROMPT, 256, 192)):
        assert ask(again, prompt, name) == found
        assert again.loop.stats().external_prefix_cache_hits_total == read, "the memory has the third block by now"
        assert_same_tokens(again.tokens(name), solo(recurrent, prompt, 8), TINY)


def removed(path: Path) -> None:
    path.unlink()


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("fault", [removed, damaged])
def test_a_state_that_cannot_be_read_costs_its_reuse_only(tmp_path, recurrent, fault) -> None:
    ask(in_one_chunk(tmp_path, recurrent), PROMPT)
    (state,) = files_of_states(tmp_path)
    again = in_one_chunk(tmp_path, recurrent)
    fault(state)
    assert ask(again, PROMPT) == 0
    assert_same_tokens(again.tokens("x"), solo(recurrent, PROMPT, 8), TINY)
    assert detail(again)["damaged_files"] == (fault is damaged)
    assert again.loop.stats().external_prefix_cache_hits_total == 0
    assert files_of_states(tmp_path) == [state], "it was written again"
    assert ask(in_one_chunk(tmp_path, recurrent), PROMPT) == 256


def test_answers_are_kept_too_and_what_is_on_the_disk_is_not_written_again(tmp_path, llama) -> None:
    first = server(tmp_path, llama)
    first.answer("x", PROMPT[:60], 80)
    history = [*PROMPT[:60], *first.tokens("x")]
    assert detail(first)["blocks_written"] == 2
    again = server(tmp_path, llama)
    assert ask(again, [*history, 5]) == 128
    assert detail(again)["blocks_written"] == 0


@pytest.mark.parametrize("other", [{"fingerprint": "other"}, {"cache_salt": "salt"}])
def test_another_model_or_salt_finds_nothing(tmp_path, llama, other) -> None:
    ask(server(tmp_path, llama), PROMPT)
    fingerprint = other.pop("fingerprint", "model")
    assert ask(server(tmp_path, llama, fingerprint), PROMPT, **other) == 0


def publish(harness: Harness, digest: str) -> None:
    """Makes the same weights live as an adapter whose files have this digest."""
    weights = random_adapter(harness.adapters.bank.layout, seed=3)
    info = VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes, digest, f"/math/{digest}")
    version = harness.adapters.registry.add("math", info)
    harness.files[info.root] = weights
    harness.wait(harness.adapters.stage(version, weights))
    harness.adapters.registry.flip(version.ref)


def test_a_version_finds_what_the_same_version_with_the_same_files_computed(tmp_path, llama) -> None:
    def started(digest: str) -> Harness:
        harness = server(tmp_path, llama)
        publish(harness, digest)
        return harness

    def asked(harness: Harness, name: str) -> int:
        ref = harness.adapters.registry.find("math").ref
        return ask(harness, PROMPT, name, adapter=ref)

    first = started("one")
    assert asked(first, "x") == 0
    again = started("one")
    assert asked(again, "x") == 256
    assert again.tokens("x") == first.tokens("x")
    assert ask(again, PROMPT, "base") == 0
    assert asked(started("two"), "x") == 0, "the same name and number with other weights"
    publish(again, "one")
    assert asked(again, "y") == 0, "the next version"


def test_a_version_in_no_file_is_not_written(tmp_path, llama) -> None:
    harness = server(tmp_path, llama)
    publish(harness, "")
    ask(harness, PROMPT, adapter=harness.adapters.registry.find("math").ref)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_while_requests_run(tmp_path, llama) -> None:
    harness = server(tmp_path, llama)
    harness.submit("long", PROMPT[:64], 200)
    harness.submit("short", [*PROMPT, 1], 1)
    while "short" not in {name for name, event in harness.events if isinstance(event, RequestFinished)}:
        harness.loop.step()
    harness.loop.step()
    assert not list(tmp_path.iterdir())
    harness.run()
    assert len(list(tmp_path.iterdir())) == 7, "the first block is that of both"


def test_a_slow_disk_holds_back_one_prompt_and_that_not_for_long(tmp_path, llama, monkeypatch) -> None:
    ask(server(tmp_path, llama), PROMPT)
    worker, clock = Later(), [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    again = server(tmp_path, llama, worker=worker)
    again.submit("read", PROMPT, 4)
    again.submit("other", PROMPT[100:], 4)
    again.run()
    assert isinstance(again.terminal("other"), RequestFinished)
    assert not again.of("read")
    assert detail(again)["prompts_waiting"] == 1
    clock[0] += 2
    again.run()
    assert again.tokens("read") == solo(llama, PROMPT, 4).tokens
    worker.run()
    again.run()


def test_two_prompts_with_one_beginning_read_it_once(tmp_path, llama) -> None:
    ask(server(tmp_path, llama), PROMPT)
    worker = Later()
    again = server(tmp_path, llama, worker=worker)
    again.submit("x", [*PROMPT[:280], 1], 4)
    again.submit("y", [*PROMPT[:280], 2], 4, n=3)
    again.run()
    assert again.loop.stats().waiting == 4
    worker.run()
    again.run()
    assert again.loop.stats().external_prefix_cache_hits_total == 256
    assert again.tokens("x") == solo(llama, [*PROMPT[:280], 1], 4).tokens
    assert again.tokens("y", 2) == solo(llama, [*PROMPT[:280], 2], 4).tokens


def test_requests_that_wait_for_the_disk_can_be_aborted_and_failed(tmp_path, llama) -> None:
    ask(server(tmp_path, llama), PROMPT)
    worker = Later()
    again = server(tmp_path, llama, worker=worker)
    again.answer("aborted", PROMPT, 4)
    again.loop.abort("aborted")
    again.answer("failed", PROMPT, 4)
    again.loop.pause(PauseMode.ABORT)
    assert isinstance(again.terminal("failed"), RequestFailed)
    again.loop.scheduler.resume()
    worker.run()
    again.run()
    assert detail(again)["prompts_waiting"] == 0
    again.submit("x", PROMPT, 4)
    while not again.of("x"):
        again.run()
        worker.run()
    assert not again.of("aborted")


def test_a_device_that_fails_while_blocks_come_back_fails_no_request(tmp_path, llama, monkeypatch) -> None:
    ask(server(tmp_path, llama), PROMPT)
    again = server(tmp_path, llama)
    arena = type(again.runner.cache.groups[0].arena)

    def fails(*_: object) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed")

    monkeypatch.setattr(arena, "write_block", fails)
    assert ask(again, PROMPT) == 0
    assert again.tokens("x") == solo(llama, PROMPT, 8).tokens
    assert detail(again)["prompts_waiting"] == 0


def test_a_reset_removes_the_files_if_asked_to(tmp_path, llama) -> None:
    harness = server(tmp_path, llama)
    ask(harness, PROMPT)
    harness.loop.reset_prefix_cache().result()
    assert list(tmp_path.iterdir())
    harness.loop.reset_prefix_cache(files=True).result()
    assert not list(tmp_path.iterdir())
    assert ask(harness, PROMPT, "y") == 0
    assert list(tmp_path.iterdir()), "later ones are written again"
