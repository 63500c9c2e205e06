"""Publishes, requests, aborts and unloads in any order."""

from __future__ import annotations

import pytest
from harness import Solo, assert_same_tokens, make_harness, solo
from hypothesis import given, settings
from hypothesis import strategies as st
from lora import QV, layout_of, merged, random_adapter
from mixed_batch import prompts
from tiny import tiny_model

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import RequestFinished

pytestmark = pytest.mark.ci

TINY = 1e-5
"""Invariant 8's bound on logprobs across shapes, for tiny float32 models."""


class World:
    """Adapters and references of the property test, made once."""

    def __init__(self) -> None:
        self.model = tiny_model("llama")
        layout = layout_of(self.model)
        self.rows = prompts(6, 60, seed=11)
        self.weights = [
            random_adapter(layout, seed, rank=1 + seed % 8, targets=QV if seed % 3 == 0 else ()) for seed in range(8)
        ]
        models = [merged(tiny_model("llama"), weights) for weights in self.weights] + [tiny_model("llama")]
        self.references: list[list[Solo]] = [[solo(model, row, 16) for row in self.rows] for model in models]


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_interleaving_of_publishes_requests_aborts_and_unloads(world: World, data: st.DataObject) -> None:
    """Three names, few slots, little KV memory: every request gets the version it was given, or ends by abort."""
    harness = make_harness(
        world.model,
        slots=data.draw(st.integers(1, 4), label="slots"),
        copies=data.draw(st.integers(0, 3), label="copies"),
        budget_tokens=data.draw(st.sampled_from([512, 4000]), label="budget"),
        max_rows=5,
    )
    registry = harness.adapters.registry
    which: dict[AdapterRef, int] = {BASE_ADAPTER: len(world.weights)}
    requests: dict[str, tuple[AdapterRef, int, object]] = {}
    aborted: set[str] = set()

    def publish() -> None:
        number = data.draw(st.integers(0, len(world.weights) - 1), label="weights")
        name = data.draw(st.sampled_from("abc"), label="name")
        which[harness.publish(name, world.weights[number], staged=data.draw(st.booleans()))] = number

    def request() -> None:
        names = [name for name in "abc" if registry.live(name)]
        lease = registry.lease(data.draw(st.sampled_from(["base", *names]), label="adapter"))
        ref, row = lease.__enter__().ref, data.draw(st.integers(0, len(world.rows) - 1), label="row")
        rid = str(len(requests))
        requests[rid] = (ref, row, lease)
        harness.submit(rid, world.rows[row], 16, adapter=ref)

    def abort() -> None:
        if requests:
            rid = data.draw(st.sampled_from(sorted(requests)), label="abort")
            aborted.add(rid)
            harness.loop.abort(rid)

    def unload() -> None:
        names = [name for name in "abc" if registry.live(name)]
        if names:
            registry.unload(data.draw(st.sampled_from(names), label="unload"))

    for _ in range(data.draw(st.integers(3, 14), label="actions")):
        data.draw(st.sampled_from([publish, publish, request, request, request, abort, unload]), label="action")()
        harness.step(data.draw(st.integers(0, 6), label="steps"))
        registry.check_integrity()
    harness.run()
    for rid, (ref, row, lease) in requests.items():
        lease.__exit__(None, None, None)
        reference, got = world.references[which[ref]][row], harness.tokens(rid)
        assert_same_tokens(got, Solo(reference.tokens[: len(got)], reference.gaps[: len(got)]), TINY)
        if rid not in aborted:
            assert isinstance(harness.terminal(rid), RequestFinished), (rid, ref)
    assert harness.adapters.pinned == 0
    registry.check_integrity()
