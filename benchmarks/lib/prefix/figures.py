"""The figures of the prefix cache, with their limits. Every ratio is of figures of the same run."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.lib.figures import Figure, errors, ratios, reported
from benchmarks.lib.prefix.replay import Replayed
from benchmarks.lib.prefix.shared import CLIENTS, Shared
from benchmarks.lib.prefix.sides import OURS, THEIRS, WITHOUT
from benchmarks.lib.prefix.turns import Turns

SECOND_AGAINST_FIRST, SECOND_AGAINST_THEIRS = 0.15, 1.0
LESS_WAITING, MORE_THROUGHPUT = 4.0, 4.0


def of_turns(turns: Mapping[str, Turns]) -> Iterator[Figure]:
    """The limits apply to the worst history."""
    ours, theirs = turns[OURS], turns[THEIRS]
    yield Figure("first turn, first token", "s", *reported(ours.first_s))
    yield Figure("mlx_lm.server's first turn", "s", *reported(theirs.first_s))
    for name, mine, other, found in (
        ("second turn", ours.second_s, theirs.second_s, ours.second_cached),
        ("another user", ours.other_s, theirs.other_s, ours.other_cached),
    ):
        yield Figure(f"{name}, first token", "s", *reported(mine))
        yield Figure(f"{name}, tokens found in the cache", "", *reported([float(tokens) for tokens in found]))
        kept = ratios(mine, ours.first_s)
        yield Figure(f"{name} against our first turn, worst", "x", kept, kept.high, SECOND_AGAINST_FIRST)
        beside = ratios(mine, other)
        yield Figure(f"{name} against mlx_lm.server, worst", "x", beside, beside.high, SECOND_AGAINST_THEIRS)


def of_replay(name: str, replayed: Mapping[str, Replayed]) -> Iterator[Figure]:
    ours, theirs = replayed[OURS], replayed[THEIRS]
    if without := replayed.get(WITHOUT):
        without_s, with_s = without.first_token_s, ours.first_token_s
        yield _ratio(f"{name}: sum of first tokens, without the cache against with it", without_s, with_s, LESS_WAITING)
        yield _ratio(f"{name}: total time, without the cache against with it", without.total_s, ours.total_s)
    yield _ratio(f"{name}: sum of first tokens against mlx_lm.server", ours.first_token_s, theirs.first_token_s)
    yield _ratio(f"{name}: total time against mlx_lm.server", ours.total_s, theirs.total_s)
    yield Figure(f"{name}: hit rate", "", *reported(ours.hit_rates))
    yield Figure(f"{name}: hit rate by our metrics", "", *reported(ours.counted_hit_rates))
    yield Figure(f"{name}: mlx_lm.server's hit rate", "", *reported(theirs.hit_rates))


def of_shared(shared: Mapping[str, Shared]) -> Iterator[Figure]:
    ours, theirs = shared[OURS], shared[THEIRS]
    name = f"{CLIENTS} clients with one prefix"
    if without := shared.get(WITHOUT):
        yield _ratio(f"{name}: throughput against no cache", ours.rates, without.rates, MORE_THROUGHPUT)
    yield _ratio(f"{name}: throughput against mlx_lm.server", ours.rates, theirs.rates)
    yield errors(f"{name}: our errors", sum(len(side.errors) for side in shared.values() if side is not theirs))


def _ratio(name: str, above: Sequence[float], below: Sequence[float], at_least: float | None = None) -> Figure:
    ratio = ratios(above, below)
    return Figure(name, "x", ratio, ratio.median, at_least, at_least=True)
