"""The figures of serving many adapters, with their limits."""

from collections.abc import Iterator, Sequence

from benchmarks.lib.adapters.decode import ALL, EIGHT, MANY, ONE, QV_ONLY, DecodeCost, Variant
from benchmarks.lib.adapters.memory import ALL as ALL_IN_MEMORY
from benchmarks.lib.adapters.memory import AdapterMemory
from benchmarks.lib.adapters.publish import Churn
from benchmarks.lib.adapters.served import KINDS, NONE, ServedPoint
from benchmarks.lib.figures import Figure, errors, percentile, ratios, reported, spread

ONE_PERCENT, QV_PERCENT, ALL_PERCENT = 12, 7, 18
ALL_OVER_PRODUCTS = 1.3
MANY_POINTS = 3
FLIP_MS, WORST_FLIP_MS, WORST_STEP = 10, 25, 1.5
GROWTH_PERCENT = 1
BYTES_OVER_FILE = 1.1


def of_decode(cost: DecodeCost) -> Iterator[Figure]:
    yield Figure("decode step of 16 rows without adapters", "ms", *reported([1e3 * step for step in cost.base]))
    for linears, limit in ((QV_ONLY, QV_PERCENT), (ALL, _all_limit(cost))):
        one, eight, many = (Variant(linears, adapters) for adapters in (ONE, EIGHT, MANY))
        for variant, percent in ((one, ONE_PERCENT), (eight, limit), (many, None)):
            yield Figure(f"decode throughput, {variant.name}", "% less", *reported(cost.percent(variant)), percent)
            yield Figure(
                f"what it adds over its products alone, {variant.name}", "x", *reported(_over_products(cost, variant))
            )
        points = [more - less for more, less in zip(cost.percent(many), cost.percent(eight), strict=True)]
        yield Figure(f"{many.name}, over 8 mixed", "points", *reported(points), MANY_POINTS)


def of_served(points: Sequence[ServedPoint]) -> Iterator[Figure]:
    for point in points:
        base = point.sides[NONE]
        clients = f"{point.concurrency} client{'s' if point.concurrency > 1 else ''}"
        yield Figure(f"served without adapters, {clients}", "tok/s", *reported(base.rates))
        for kind in KINDS:
            if kind != NONE:
                ratio = ratios(point.sides[kind].rates, base.rates)
                yield Figure(f"served with {kind} against none, {clients}", "x", ratio, ratio.median)
    sides = [side for point in points for side in point.sides.values()]
    yield errors("errors and short answers, served", sum(len(side.errors) + side.short for side in sides))


def of_publish(churn: Churn) -> Iterator[Figure]:
    """The limit on steps applies to the slowest step during staging, relative to the median step without staging."""
    yield Figure("publish: until a row has it", "s", *reported(churn.admitted_s))
    flips = spread(1e3 * publish.flip_s for publish in churn.publishes)
    yield Figure("publish: the flip, median", "ms", flips, flips.median, FLIP_MS)
    yield Figure("publish: the flip, worst", "ms", flips, flips.high, WORST_FLIP_MS)
    yield Figure("publish: staging, all of it", "s", *reported([publish.stage_s for publish in churn.publishes]))
    yield Figure("publish: units of device work", "", *reported([publish.units for publish in churn.publishes]))
    yield Figure("publish: the longest unit", "ms", *reported([1e3 * churn.longest_unit_s]))
    yield from _steps(churn)
    yield errors("publish: requests that failed", len(churn.failed))
    yield errors("publish: requests with a wrong token", churn.wrong)
    yield Figure("publish: tokens that agree with the control", "", *reported([churn.compared]))
    yield Figure("publish: requests compared up to a tie only", "", *reported([churn.ties]))
    yield errors("publish: versions that found no slot", sum(not publish.in_slot for publish in churn.publishes))
    before, after = churn.before, churn.after
    for name, then, now in (
        ("MLX's active bytes", before.active_bytes, after.active_bytes),
        ("live arrays", before.arrays, after.arrays),
    ):
        yield Figure(f"publish: growth of {name}", "%", *reported([100 * (now / then - 1)]), GROWTH_PERCENT)


def of_memory(kinds: Sequence[AdapterMemory]) -> Iterator[Figure]:
    for kind in kinds:
        limit = BYTES_OVER_FILE if kind.name == ALL_IN_MEMORY else None
        yield Figure(f"memory over file, {kind.name}", "x", *reported([kind.ratio]), limit)
        if kind.name == ALL_IN_MEMORY:
            yield Figure("memory of slot 0", "MB", *reported([kind.slot_zero / 1e6]))
            yield Figure("memory of unused slots, 4 adapters of 12", "MB", *reported([kind.unused / 1e6]))


def _all_limit(cost: DecodeCost) -> float:
    """The limit in percent. It is higher on machines where the low-rank products alone take much time."""
    return max(ALL_PERCENT, spread(cost.least_percent(Variant(ALL, EIGHT), ALL_OVER_PRODUCTS)).median)


def _over_products(cost: DecodeCost, variant: Variant) -> list[float]:
    added = zip(cost.added(variant), cost.products[variant.name], strict=True)
    return [more / alone for more, alone in added]


def _steps(churn: Churn) -> Iterator[Figure]:
    quiet, staging = spread(churn.quiet_step_s), spread(churn.staging_step_s)
    yield Figure("publish: step without staging", "ms", *reported([1e3 * step for step in churn.quiet_step_s]))
    relative = spread(step / quiet.median for step in churn.staging_step_s)
    yield Figure("publish: step while staging, worst", "x", relative, staging.high / quiet.median, WORST_STEP)
    late = percentile(churn.staging_step_s, 99) / quiet.median
    yield Figure("publish: step while staging, 99th percentile", "x", *reported([late]))
    yield Figure("publish: step without staging, worst", "x", *reported([quiet.high / quiet.median]))
    late = percentile(churn.quiet_step_s, 99) / quiet.median
    yield Figure("publish: step without staging, 99th percentile", "x", *reported([late]))
