"""Eviction of idle adapters: versions go to copies or files, are staged again on demand, and give the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Harness, make_harness
from lora import layout_of, random_adapter
from tiny import tiny_model

from mlx_parallm.adapters.cards import Residence
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import RequestFinished

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def trained(harness: Harness, name: str, seed: int) -> AdapterRef:
    """A version that is live, and in no file."""
    return harness.publish(name, random_adapter(layout_of(tiny_model("llama")), seed), saved=False)


def from_files(harness: Harness, name: str, seed: int) -> AdapterRef:
    return harness.publish(name, random_adapter(layout_of(tiny_model("llama")), seed))


def say(harness: Harness, request_id: str, ref: AdapterRef) -> list[int]:
    harness.answer(request_id, PROMPT, 8, adapter=ref)
    assert isinstance(harness.terminal(request_id), RequestFinished)
    return harness.tokens(request_id)


def evict(harness: Harness) -> None:
    harness.wait(harness.loop.adapters.evict_idle())
    harness.run()


def residence(harness: Harness, ref: AdapterRef) -> Residence:
    version = harness.adapters.registry.version(ref)
    assert version is not None
    return harness.adapters.residence(version)


@pytest.mark.parametrize(("make", "copies"), [(trained, 8), (trained, 0), (from_files, 8), (from_files, 0)])
def test_what_was_in_the_bank_says_the_same_again(make: Callable[[Harness, str, int], AdapterRef], copies: int) -> None:
    harness = make_harness(copies=copies)
    refs = [make(harness, name, seed) for seed, name in enumerate(("a", "b", "c"), start=1)]
    before = [say(harness, f"before {ref}", ref) for ref in refs]
    assert len(set(map(tuple, before))) == 3
    evict(harness)
    assert (harness.adapters.bytes_held, harness.adapters.bank.nbytes, harness.adapters.slots_used) == (0, 0, 0)
    kept = Residence.COPY if copies or make is trained else Residence.FILE
    assert {residence(harness, ref) for ref in refs} == {kept}
    assert [say(harness, f"after {ref}", ref) for ref in refs] == before
    assert {residence(harness, ref) for ref in refs} == {Residence.SLOT}


def test_a_version_in_no_file_stays_though_requests_end_while_it_is_evicted() -> None:
    harness = make_harness()
    ref = trained(harness, "a", 1)
    before = say(harness, "before", ref)
    evicted = harness.adapters.evict_idle()
    while not evicted.done():
        harness.adapters.add_request(BASE_ADAPTER)
        harness.adapters.remove_request(BASE_ADAPTER)
        harness.step()
    assert say(harness, "after", ref) == before


def test_a_version_that_rows_hold_stays_and_so_does_the_bank() -> None:
    harness = make_harness()
    held, idle = from_files(harness, "held", 1), from_files(harness, "idle", 2)
    expected = say(harness, "before", held)
    harness.submit("r", PROMPT, 8, adapter=held)
    harness.until(lambda: harness.tokens("r"))
    harness.wait(harness.loop.adapters.evict_idle())
    harness.run()
    assert harness.tokens("r") == expected
    assert (residence(harness, held), residence(harness, idle)) == (Residence.SLOT, Residence.COPY)
    assert harness.adapters.bytes_held > 0
    evict(harness)
    assert harness.adapters.bytes_held == 0
