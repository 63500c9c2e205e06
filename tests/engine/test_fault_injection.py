"""Every call that the device loop makes into MLX may fail, once or for ever: the thread survives, or says so.

Faults are injected where the loop leaves Python: at each place that calls `mx.eval`, `mx.async_eval` or
`mx.synchronize`, and at the methods of the parts that use MLX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from harness import Harness, make_harness
from lora import QV, layout_of, random_adapter
from micro_steps import MicroSteps
from tiny import tiny_model
from word_grammar import Words

from mlx_parallm.core.device import DeviceSchedule
from mlx_parallm.core.requests import RequestFailed, SamplingParams
from mlx_parallm.errors import DeviceLostError, DeviceMemoryError, StepFailedError

pytestmark = pytest.mark.ci

NO_MEMORY = "[metal::malloc] Unable to allocate 1073741824 bytes."
COMMAND_BUFFER = "[METAL] Command buffer execution failed: Caused GPU Timeout Error"
SAMPLED = SamplingParams(temperature=0.7, seed=9, presence_penalty=0.4)
CHOICES = [
    ("base", 0),
    ("group", 0),
    ("group", 1),
    ("on a", 0),
    ("on b", 0),
    ("on c", 0),
    ("on d", 0),
    ("scored", 0),
    ("even", 0),
    ("late", 0),
]


class Injected:
    """Raises in place of a call: of those that `chosen` counts, from number `first` on, `times` times."""

    def __init__(self, message: str, times: float, first: int = 0) -> None:
        self.message, self.left, self.first = message, times, first
        self.seen = 0

    def strike(self) -> None:
        self.seen += 1
        if self.seen > self.first and self.left > 0:
            self.left -= 1
            raise RuntimeError(self.message)


def evaluated(number: int) -> None:
    mx.eval(mx.zeros((4,)) + number)


def make() -> Harness:
    """Four adapters for two slots, and training beside them. No file holds the first, which is in a slot."""
    model = tiny_model("llama")
    layout = layout_of(model)
    harness = make_harness(
        model,
        slots=2,
        training=MicroSteps(4, evaluated),
        schedule=DeviceSchedule(training_time_share=0.5),
        speculates=True,
    )
    harness.publish("a", random_adapter(layout, 1, targets=QV), saved=False)
    for seed, name in enumerate("bcd", start=2):
        harness.publish(name, random_adapter(layout, seed), staged=False)
    return harness


def submit_all(harness: Harness) -> Iterator[None]:
    """A row that outgrows its blocks, a group that forks, adapters that are evicted, prompt scores, a grammar, one
    that comes late. Yields where the loop may run."""
    harness.submit("base", [5, 3, 1] * 8, 60)
    harness.submit("group", [2, 7] * 50, 12, n=2, sampling=SAMPLED)
    for name in "abcd":
        live = harness.adapters.registry.live(name)
        harness.submit(f"on {name}", [ord(name), 4, 8], 10, adapter=live.ref)
    harness.submit("scored", [9, 8, 7, 6, 5], 3, prompt_logprobs=2)
    harness.submit("even", [6, 1], 9, grammar=Words(tuple(range(40, 60)), tuple(range(60, 80))))
    yield
    harness.submit("late", [11] * 150, 6)


def play(harness: Harness, limit: int = 1500) -> None:
    """Everything, to its end. No step raises, and all integrity checks pass after each."""
    for _ in submit_all(harness):
        harness.step(12)
    harness.run(limit=limit)


def said(harness: Harness) -> dict[tuple[str, int], list[int]]:
    return {choice: harness.tokens(*choice) for choice in CHOICES}


def failed(harness: Harness) -> set[str]:
    """The requests that failed, with an error that says so."""
    ends = {request_id: harness.terminal(request_id) for request_id, _ in CHOICES}
    found = {request_id: end for request_id, end in ends.items() if isinstance(end, RequestFailed)}
    for end in found.values():
        assert isinstance(end.error, StepFailedError | DeviceMemoryError | RuntimeError), end.error
    return set(found)


def assert_nothing_is_left(harness: Harness) -> None:
    stats = harness.loop.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes_held) == (0, 0, 0)
    assert harness.adapters.pinned == 0


def assert_others_unharmed(harness: Harness, undisturbed: dict[tuple[str, int], list[int]], guilty: set[str]) -> None:
    for choice, tokens in said(harness).items():
        if choice[0] not in guilty:
            assert tokens == undisturbed[choice], choice
    assert_nothing_is_left(harness)


@pytest.fixture(scope="module", autouse=True)
def _tidying() -> Iterator[None]:
    """The pool is tidied whenever a row has ended."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mlx_parallm.engine.memory._QUIET_S", -1.0)
        patched.setattr("mlx_parallm.engine.memory._QUIET_WITH_CACHE_S", -1.0)
        yield


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, int], list[int]]:
    harness = make()
    play(harness)
    assert not failed(harness)
    return said(harness)


# ---- every place that evaluates --------------------------------------------------------------------


def inject(monkeypatch: pytest.MonkeyPatch, place: tuple[str, str], fault: Injected) -> None:
    for name in CALLS:
        original = getattr(mx, name)

        def evaluating(*arrays: object, call: Callable[..., None] = original) -> None:
            code = sys._getframe(1).f_code
            if (code.co_qualname, code.co_filename.rsplit("/", 1)[1]) == place:
                fault.strike()
            call(*arrays)

        monkeypatch.setattr(mx, name, evaluating)


CALLS = ("eval", "async_eval", "synchronize")
EVALUATING = [
    ("Arena.resize", "arena.py"),
    ("Arena.copy", "arena.py"),
    ("Arena._put", "arena.py"),
    ("BatchRunner.launch", "runner.py"),
    ("BatchRunner.sample", "runner.py"),
    ("BatchRunner.wait", "runner.py"),
    ("LinearGroup.fit", "bank.py"),
    ("LinearGroup.write", "bank.py"),
    ("LinearGroup.read", "bank.py"),
]


NOT_NEEDED = ("Arena.copy", "Arena._put", "LinearGroup.read")
"""A row that cannot copy a block computes it; after a failed eviction the bank is made anew and needs none."""


@pytest.mark.parametrize(("message", "first"), [(NO_MEMORY, 0), (COMMAND_BUFFER, 0), (COMMAND_BUFFER, 3)])
@pytest.mark.parametrize("place", EVALUATING, ids=lambda place: place[0])
def test_one_fault_costs_only_whom_it_must(
    place: tuple[str, str],
    first: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[tuple[str, int], list[int]],
) -> None:
    harness = make()
    fault = Injected(message, times=1, first=first)
    inject(monkeypatch, place, fault)
    play(harness)
    assert fault.seen, "the loop evaluates there"
    guilty = failed(harness)
    assert_others_unharmed(harness, undisturbed, guilty)
    if place[1] in ("arena.py", "bank.py") and message is NO_MEMORY:
        assert not guilty, "it waits"
    assert len(guilty) < len({request_id for request_id, _ in CHOICES})


@pytest.mark.parametrize("message", [NO_MEMORY, COMMAND_BUFFER])
@pytest.mark.parametrize("place", EVALUATING, ids=lambda place: place[0])
def test_a_call_that_always_fails_ends_every_request_that_needs_it(
    place: tuple[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[tuple[str, int], list[int]],
) -> None:
    """No endless loop, and the thread goes on: once the fault is gone the next requests are served."""
    harness = make()
    with monkeypatch.context() as broken:
        inject(broken, place, Injected(message, times=float("inf")))
        play(harness)
        guilty = failed(harness)
        assert guilty or place[0] in NOT_NEEDED
        assert_others_unharmed(harness, undisturbed, guilty)
    harness.events.clear()
    harness.adapters.take_failures()
    play(harness)
    assert not failed(harness)
    assert_others_unharmed(harness, undisturbed, set())


# ---- the parts' methods ------------------------------------------------------------------------------

METHODS = [
    "runner.begin",
    "runner.wait",
    "runner.launch",
    "runner.sample",
    "runner.read",
    "runner.cache.open",
    "runner.cache.fork",
    "runner.cache.extend",
    "runner.cache.freeze",
    "runner.cache.release_windows",
    "runner.cache.close",
    "runner.cache.tidy",
    "adapters.waits",
    "loop.scheduler._memory.ready",
    "adapters.pin",
    "adapters.advance",
    "loop.training.waits",
    "loop.training.pace",
    "loop.training.advance",
]
RECOVERING = ["runner.clear", "adapters.reset", "loop.training.reset"]


def break_method(
    monkeypatch: pytest.MonkeyPatch, harness: Harness, path: str, error: Exception, calls: range
) -> list[int]:
    """Makes these of the method's calls raise, counted from 0. Returns a list that will hold those that did."""
    part: object = harness
    *parts, name = path.split(".")
    for each in parts:
        part = getattr(part, each)
    original, seen, raised = getattr(part, name), iter(range(1 << 30)), []

    def failing(*args: object, **fields: object) -> object:
        if (call := next(seen)) in calls:
            raised.append(call)
            raise error
        return original(*args, **fields)

    monkeypatch.setattr(part, name, failing)
    return raised


@pytest.mark.parametrize(
    ("message", "calls"), [(NO_MEMORY, range(1)), (COMMAND_BUFFER, range(2, 4))], ids=["first", "third and fourth"]
)
@pytest.mark.parametrize("path", METHODS)
def test_a_fault_of_any_part_is_survived(
    path: str,
    message: str,
    calls: range,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[tuple[str, int], list[int]],
) -> None:
    harness = make()
    raised = break_method(monkeypatch, harness, path, RuntimeError(message), calls)
    play(harness)
    assert raised or calls.start, "no call of it was made at all"
    assert_others_unharmed(harness, undisturbed, failed(harness))


@pytest.mark.parametrize("path", RECOVERING)
def test_a_fault_of_the_recovery_is_one_fault_more(
    path: str, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[tuple[str, int], list[int]]
) -> None:
    harness = make()
    break_method(monkeypatch, harness, path, RuntimeError(NO_MEMORY), range(2))
    for method in ("runner.sample", "adapters.advance", "loop.training.advance"):
        break_method(monkeypatch, harness, method, RuntimeError(NO_MEMORY), range(3, 4))
    play(harness)
    assert_others_unharmed(harness, undisturbed, failed(harness))


@pytest.mark.parametrize("path", METHODS)
def test_faults_without_end_cost_everything_or_end_the_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a loop that goes on and gets nowhere."""
    harness = make()
    break_method(monkeypatch, harness, path, RuntimeError(COMMAND_BUFFER), range(1 << 30))
    try:
        play(harness)
    except DeviceLostError:
        return
    failed(harness)
    assert_nothing_is_left(harness)


def test_a_device_that_fails_whatever_it_is_given_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make()
    monkeypatch.setattr("mlx_parallm.engine.faults.check_device", lambda: (_ for _ in ()).throw(RuntimeError("gone")))
    break_method(monkeypatch, harness, "runner.begin", RuntimeError(COMMAND_BUFFER), range(1))
    with pytest.raises(DeviceLostError):
        play(harness)
