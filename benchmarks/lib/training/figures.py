"""The figures of training while serving, with their limits."""

from collections.abc import Iterator, Sequence

from benchmarks.lib.figures import Figure, errors, ratios, reported, spread
from benchmarks.lib.training.memory import ADAPTERS, SERVING, TRAINER, TRAINING, Memory
from benchmarks.lib.training.publish import Live
from benchmarks.lib.training.served import LEARNING, LITTLE, PRIORITY, QUARTER, SHARES, Served, Window
from benchmarks.lib.training.served import SERVING as ONLY_SERVING
from benchmarks.lib.training.update import Cost

RATE_OF_REST, LEARNING_RATE, LEARNING_GAP = 0.95, 0.83, 1.2
PRIORITY_RATE, PRIORITY_GAP, PRIORITY_UPDATES = 0.45, 1.8, 2.5
LIVE_LIMIT_MS = 50
SPEED_UP, MILLIONTHS_APART = 3, 10
ONE_COPY = 0.6
NAMES = {ONLY_SERVING: "alone", LITTLE: "5 %", LEARNING: "RL", QUARTER: "25 %", PRIORITY: "priority"}
"""What the figures call the windows."""


def of_served(served: Served) -> Iterator[Figure]:
    """Repeats are compared in pairs. The limit on stalls applies to the longest of all."""
    alone, learning, priority = (served.of(kind) for kind in (ONLY_SERVING, LEARNING, PRIORITY))
    rates = ratios(_rates(learning), _rates(alone))
    rest = ratios(
        _rates(learning), [each.rate * (1 - other.share) for each, other in zip(alone, learning, strict=True)]
    )
    yield Figure("RL: throughput against inference only", "x", rates, rates.median, LEARNING_RATE, at_least=True)
    yield Figure("RL: the same, over the time that training leaves", "x", rest, rest.median, RATE_OF_REST, True)
    gaps = ratios(_gaps(learning), _gaps(alone))
    yield Figure("RL: median inter-token latency", "x", gaps, gaps.median, LEARNING_GAP)
    yield from _stalls(served)
    rates, gaps = ratios(_rates(priority), _rates(alone)), ratios(_gaps(priority), _gaps(alone))
    yield Figure("priority: throughput against inference only", "x", rates, rates.median, PRIORITY_RATE, at_least=True)
    yield Figure("priority: median inter-token latency", "x", gaps, gaps.median, PRIORITY_GAP)
    updates = ratios(*([each.updates_per_minute for each in windows] for windows in (priority, learning)))
    yield Figure("priority: updates against RL's", "x", updates, updates.median, PRIORITY_UPDATES, at_least=True)
    yield from _frontier(served)
    yield Figure("no requests: updates a minute", "", *reported(served.updates_alone))
    yield Figure("device time of an update", "s", *reported(served.update_device_s))
    yield errors("requests that failed while served", len(served.errors))


def _frontier(served: Served) -> Iterator[Figure]:
    """What more updates cost the clients."""
    for kind, name in NAMES.items():
        windows = served.of(kind)
        if kind in SHARES:
            yield Figure(f"{name}: updates a minute", "", *reported([each.updates_per_minute for each in windows]))
        yield Figure(f"{name}: tokens", "tok/s", *reported(_rates(windows)))
        for what, seconds in (
            ("99 % of tokens come within", [each.gap_99_s for each in windows]),
            ("99 % of first tokens come within", [each.first_99_s for each in windows]),
        ):
            yield Figure(f"{name}: {what}", "ms", *reported([1e3 * each for each in seconds]))


def _stalls(served: Served) -> Iterator[Figure]:
    """In both training modes, the limit is the configured stall plus one decode step of inference only."""
    limit = 1e3 * (served.budget_s + spread(_gaps(served.of(ONLY_SERVING))).median)
    for mode, kind in (("RL", LEARNING), ("priority", PRIORITY)):
        windows = served.of(kind)
        for name, stalls in (
            ("longest wait for a token, clients'", [1e3 * each.longest_gap_s for each in windows]),
            ("longest decode gap, server's", [1e3 * each.stall_s for each in windows]),
        ):
            value = spread(stalls)
            yield Figure(f"{mode}: {name}", "ms", value, value.high, limit)


def of_publish(lives: Sequence[Live]) -> Iterator[Figure]:
    """The limits apply to the slowest publish."""
    beyond = spread(1e3 * live.beyond_s for live in lives)
    yield Figure("update to live, less the unit in progress: worst", "ms", beyond, beyond.high, LIVE_LIMIT_MS)
    yield Figure("update to live", "ms", *reported([1e3 * live.seconds for live in lives]))
    yield Figure("the unit in progress", "ms", *reported([1e3 * live.unit_s for live in lives]))
    yield Figure("units of device work between update and live", "", *reported([live.units for live in lives]))


def of_update(costs: Sequence[Cost]) -> Iterator[Figure]:
    for cost in costs:
        speed_up = ratios(cost.plain_s, cost.ours_s)
        yield Figure(f"update: plain over ours, {cost.name}", "x", speed_up, speed_up.median, SPEED_UP, at_least=True)
        yield Figure(f"update: ours, {cost.name}", "s", *reported(cost.ours_s))
        yield Figure(f"update: plain, {cost.name}", "s", *reported(cost.plain_s))
        yield Figure(f"update: memory of a micro-step and gradients, {cost.name}", "MB", *reported([cost.peak_mb]))
        yield Figure(f"update: longest unit of device work, {cost.name}", "s", *reported(cost.longest_unit_s))
        apart, plainly = reported([1e6 * cost.difference]), reported([1e6 * cost.plain_difference])
        yield Figure(f"update: gradients apart, {cost.name}", "1e-6", *apart, MILLIONTHS_APART)
        yield Figure(f"update: the plain ones, summed by MLX, {cost.name}", "1e-6", *plainly)


def of_memory(memories: Sequence[Memory]) -> Iterator[Figure]:
    """Models below 2 GB have no limit, because the adapter is a large part of their memory."""
    for memory in memories:
        for kind in (SERVING, ADAPTERS, TRAINING, TRAINER):
            if kind in memory.held:
                yield Figure(f"{memory.model}: peak, {kind}", "MB", *reported([memory.held[kind].peak / 1e6]))
        limit = ONE_COPY if memory.weights >= 2e9 else None
        yield Figure(f"{memory.model}: peak, one process over two", "x", *reported([memory.ratio]), limit)


def _rates(windows: Sequence[Window]) -> list[float]:
    return [window.rate for window in windows]


def _gaps(windows: Sequence[Window]) -> list[float]:
    return [window.gap_s for window in windows]
