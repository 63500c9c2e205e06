"""Versions come and go under traffic, with the prefix cache on: no answer is of a wrong version, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from harness import Harness, make_harness
from lora import QV, layout_of, merged, random_adapter
from mixed_batch import text
from tiny import tiny_model

from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.weights import Version, VersionInfo
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.device import PauseMode
from mlx_parallm.core.requests import RequestFailed, RequestFinished, SamplingParams, SequenceOutput
from mlx_parallm.engine.memory import PrefixRoot
from mlx_parallm.errors import ConflictError
from mlx_parallm.kv.blocks import BLOCK_TOKENS

pytestmark = pytest.mark.ci

MERGED = 3e-5
"""Bound on the differences of logprobs to a model whose weights have the adapter added, in float32. Those of another
version differ by more than a tenth."""

SHOWN = SamplingParams(temperature=0.0, top_logprobs=0)
BASE = -1
"""The number of the base model among the weights."""


class Truth:
    """The base model and some adapters, each merged into a model of its own."""

    def __init__(self) -> None:
        self.model = tiny_model("llama")
        layout = layout_of(self.model)
        self.weights = [
            random_adapter(layout, seed, rank=1 + seed, targets=() if seed % 2 else QV) for seed in range(5)
        ]
        self._models = [merged(tiny_model("llama"), weights) for weights in self.weights]
        self._models.append(tiny_model("llama"))  # BASE

    def check(self, number: int, prompt: list[int], outputs: list[SequenceOutput], label: object) -> None:
        """Teacher-forced: each token is the best of this model alone, and its logprob is this model's."""
        tokens = [token for output in outputs for token in output.token_ids]
        if not tokens:
            return
        logits = self._models[number](mx.array([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :]
        logprobs = np.array(logits - mx.logsumexp(logits, -1, keepdims=True))
        expected = logprobs[range(len(tokens)), tokens]
        assert (logprobs.max(-1) - expected).max() <= 10 * MERGED, label
        got = [entry.logprob for output in outputs for entry in output.logprobs]
        assert np.abs(expected - got).max() <= MERGED, label


@dataclass
class Asked:
    """A request under way: whose weights it must be answered with, and the lease of its version."""

    prompt: list[int]
    number: int
    lease: AbstractContextManager[Version]


@dataclass
class Traffic:
    """Requests and changes of versions at random. Every answer is checked when it ends."""

    truth: Truth
    harness: Harness
    rng: random.Random
    names: str = "abc"
    which: dict[AdapterRef, int] = field(default_factory=lambda: {BASE_ADAPTER: BASE})
    asked: dict[str, Asked] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=lambda: [text(260, seed) for seed in range(3)])
    count: int = 0
    checked: int = 0
    failed: int = 0

    @property
    def registry(self) -> AdapterRegistry:
        return self.harness.adapters.registry

    # -- what may happen -------------------------------------------------------------------------

    def publish(self) -> None:
        number = self.rng.randrange(len(self.truth.weights))
        name = self.rng.choice(self.names)
        self.which[self.harness.publish(name, self.truth.weights[number], staged=self.rng.random() < 0.5)] = number

    def rollback(self) -> None:
        name = self.rng.choice(self.names)
        if self.registry.live(name):
            with suppress(ConflictError):
                self.registry.rollback(name, lambda version: version.readable)

    def unload(self) -> None:
        name = self.rng.choice(self.names)
        if self.registry.live(name):
            self.registry.unload(name)

    def restore(self) -> None:
        """As the selector of a checkpoint does after an unload: the same number, in a new object."""
        gone = [ref for ref in self.which if ref != BASE_ADAPTER and self.registry.version(ref) is None]
        if gone:
            ref = self.rng.choice(gone)
            weights = self.truth.weights[self.which[ref]]
            info = VersionInfo(weights.rank, weights.alpha, weights.targets, weights.nbytes, root=f"/{ref}")
            self.harness.files[info.root] = weights
            self.registry.restore(ref, info)

    def ask(self) -> None:
        """By name, by name@version, or the base model; the prompt has much in common with others, or goes on from an
        answer."""
        known = self.registry.versions()
        selectors = ["base", *(str(version.ref) for version in known)]
        selectors += [name for name in self.names if self.registry.live(name)] * 2
        lease = self.registry.lease(self.rng.choice(selectors))
        ref = lease.__enter__().ref
        prompt = self.rng.choice(self.texts)[: self.rng.choice([40, 64, 65, 130, 200, 250])]
        if self.rng.random() < 0.3:
            prompt = [*prompt, self.rng.randrange(256)]
        rid, self.count = str(self.count), self.count + 1
        self.asked[rid] = Asked(prompt, self.which[ref], lease)
        salt = self.rng.choice(["", "", "salt"])
        self.harness.submit(rid, prompt, self.rng.choice([1, 6, 40]), sampling=SHOWN, adapter=ref, cache_salt=salt)

    def abort(self) -> None:
        """Sometimes the lease of a request ends before the engine hears that its client is gone."""
        if self.asked:
            rid = self.rng.choice(list(self.asked))
            lease = self.asked.pop(rid).lease
            if self.rng.random() < 0.5:
                lease.__exit__(None, None, None)
                self.step()
                self.harness.loop.abort(rid)
            else:
                self.harness.loop.abort(rid)
                lease.__exit__(None, None, None)

    # -- the loop --------------------------------------------------------------------------------

    def step(self) -> None:
        self.harness.loop.step()
        self.harness.loop.check_integrity()
        self.registry.check_integrity()
        check_registered(self.harness)
        for rid in [rid for rid, event in self.harness.events if isinstance(event, RequestFinished | RequestFailed)]:
            if rid in self.asked:
                self.check(rid, self.asked.pop(rid))

    def check(self, rid: str, asked: Asked) -> None:
        """Checks an answer that has ended, and forgets its events."""
        outputs = [event for event in self.harness.of(rid) if isinstance(event, SequenceOutput)]
        self.truth.check(asked.number, asked.prompt, outputs, (rid, asked.number))
        self.failed += isinstance(self.harness.terminal(rid), RequestFailed)
        self.harness.events[:] = [(other, event) for other, event in self.harness.events if other != rid]
        self.checked += 1
        asked.lease.__exit__(None, None, None)

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.asked:
                return
            self.step()
        raise AssertionError("requests do not end")


def check_registered(harness: Harness) -> None:
    """A registered block holds tokens whose ids are known, and belongs to the version in the row's slot."""
    for row in harness.loop.scheduler.live:
        node = row.node if row.node is not None and row.node.alive else None
        while node is not None and node.depth:
            assert list(node.ids) == row.tokens[(node.depth - 1) * BLOCK_TOKENS : node.depth * BLOCK_TOKENS]
            assert isinstance(node.root, PrefixRoot)
            assert node.root.version is harness.adapters.version(row.adapter)
            node = node.parent


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


# ---- versions under traffic ------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("lookahead", [True, False])
def test_no_answer_is_of_a_wrong_version(truth: Truth, changes: int, lookahead: bool) -> None:
    harness = make_harness(truth.model, slots=3, copies=2, max_rows=6, budget_tokens=6000, lookahead=lookahead)
    traffic = Traffic(truth, harness, random.Random(changes + lookahead))
    for _ in range(changes):
        traffic.rng.choice([traffic.publish, traffic.publish, traffic.rollback, traffic.unload, traffic.restore])()
        for _ in range(traffic.rng.randint(0, 3)):
            traffic.rng.choice([traffic.ask, traffic.ask, traffic.ask, traffic.abort])()
            for _ in range(traffic.rng.randint(0, 8)):
                traffic.step()
    traffic.run()
    assert traffic.checked > changes // 2
    assert traffic.failed == 0
    assert harness.runner.cache.hits > 0
    harness.loop.step()
    reachable = {*traffic.registry.versions(), traffic.registry.find("base")}
    assert {root.version for root in harness.runner.cache.index.roots()} <= reachable


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_with_a_small_pool_and_faults(
    truth: Truth, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eviction, preemption, aborts, pauses and failed units: who is answered is answered rightly."""
    rng = random.Random(seed)
    harness = make_harness(
        truth.model,
        slots=rng.randint(1, 4),
        copies=rng.randint(0, 3),
        max_rows=5,
        budget_tokens=rng.choice([512, 768, 1200]),
        lookahead=rng.random() < 0.5,
    )
    for method in ("begin", "sample", "read"):
        call = getattr(harness.runner, method)

        def failing(*arguments: object, call: Callable[..., object] = call) -> object:
            if rng.random() < 0.01:
                raise RuntimeError("injected")
            return call(*arguments)

        monkeypatch.setattr(harness.runner, method, failing)
    traffic = Traffic(truth, harness, rng)
    traffic.publish()
    for _ in range(120):
        action = rng.choice([traffic.ask, traffic.ask, traffic.ask, traffic.abort, traffic.publish, pause])
        action(harness) if action is pause else action()
        for _ in range(rng.randint(0, 5)):
            failures = harness.loop.counters.failed_steps
            traffic.step()
            if harness.loop.counters.failed_steps > failures:
                assert not harness.runner.cache.index.roots(), "nothing that a failed unit has written can be found"
    traffic.run()
    assert traffic.checked > traffic.failed


def pause(harness: Harness) -> None:
    harness.loop.pause(PauseMode.KEEP)
    harness.loop.step()
    harness.loop.scheduler.resume()


# ---- the end of a version ----------------------------------------------------------------------------


def test_a_chain_lasts_as_long_as_its_version_is_leased(truth: Truth) -> None:
    harness = make_harness(truth.model)
    ref = harness.publish("a", truth.weights[0])
    registry, cache = harness.adapters.registry, harness.runner.cache
    with registry.lease("a") as version:
        harness.answer("r", text(200, 1), 4, adapter=ref)
        registry.unload("a")
        harness.loop.step()
        assert [root.version for root in cache.index.roots()] == [version]
        harness.answer("s", text(200, 1), 4, adapter=ref)
        assert harness.terminal("s").cached_tokens == 192
    harness.loop.step()
    assert cache.index.roots() == []
    assert cache.bytes_cached == 0


# ---- what one client can do ----------------------------------------------------------------------------


def test_salts_without_end_evict_the_oldest_and_take_no_memory_on_the_host() -> None:
    """Nodes and roots are at most as many as blocks. A prompt that is used in between stays."""
    harness = make_harness(budget_tokens=32 * BLOCK_TOKENS, max_batched_tokens=2048)
    cache, shared = harness.runner.cache, text(200, 3)
    for number in range(300):
        harness.answer(f"salt {number}", text(100, number), 1, cache_salt=str(number))
        if number % 5 == 0:
            harness.answer(f"shared {number}", shared, 1)
            assert harness.terminal(f"shared {number}").cached_tokens == (192 if number else 0)
        assert len(cache.index.roots()) <= 32
    assert cache.evictions > 300
