"""The figures of serving, with their limits."""

from collections.abc import Iterator

from benchmarks.lib.figures import Figure, errors, ratios, reported, spread
from benchmarks.lib.memory import Memory
from benchmarks.lib.peers import MLX_LM
from benchmarks.lib.serving.decode import BARE, GREEDY, HALF, TOP_P, Decode
from benchmarks.lib.serving.fairness import Fairness
from benchmarks.lib.throughput import Point

RATE_LIMITS = {1: 0.97, 8: 1.5, 16: 1.8, 32: 1.8}
CHECKOUT_LIMIT = 0.95
FIRST_TOKEN_AT, FIRST_TOKEN_LIMIT = 16, 0.5
BARE_LIMIT, HALF_SAMPLED_LIMIT = 0.95, 0.9
GAP_LIMIT_S, GAP_LIMIT_STEPS, SHORT_LIMIT_S = 0.75, 6, 2.0
KV_FACTOR, MEMORY_ALLOWANCE = 2, 150e6


def of_throughput(points: list[Point]) -> Iterator[Figure]:
    """Of this server's rate over that of mlx_lm.server, or over that of another checkout, which may be 5 % faster."""
    for point in points:
        of_mlx_lm = point.theirs.name == MLX_LM
        against = f"against {point.theirs.name}, {point.concurrency} clients"
        limit = RATE_LIMITS[point.concurrency] if of_mlx_lm else CHECKOUT_LIMIT
        ratio = ratios(point.ours.rates, point.theirs.rates)
        yield Figure(f"throughput {against}", "x", ratio, ratio.median, limit, at_least=True)
        ratio = ratios(point.ours.first_token_s, point.theirs.first_token_s)
        first_limit = FIRST_TOKEN_LIMIT if of_mlx_lm and point.concurrency == FIRST_TOKEN_AT else None
        yield Figure(f"median first token {against}", "x", ratio, ratio.median, first_limit)
    shares = [share for point in points for side in (point.ours, point.theirs) for share in side.client_cpu]
    yield Figure("the benchmark's own share of a core, throughput", "", *reported(shares))
    yield errors("our errors and short answers, throughput", sum(len(p.ours.errors) + p.ours.short for p in points))


def of_decode(decode: Decode) -> Iterator[Figure]:
    rates = decode.rates
    against_bare = ratios(rates[GREEDY], rates[BARE])
    half, top_p = ratios(rates[HALF], rates[GREEDY]), ratios(rates[TOP_P], rates[GREEDY])
    yield Figure("decode at 16 rows against the bare loop", "x", against_bare, against_bare.median, BARE_LIMIT, True)
    yield Figure("half the rows at temperature 1 against greedy", "x", half, half.median, HALF_SAMPLED_LIMIT, True)
    yield Figure("all rows top-p 0.9 against greedy", "x", top_p, top_p.median)
    yield Figure("the benchmark's own share of a core, decode", "", *reported(decode.client_cpu))
    yield errors("our errors, decode", len(decode.errors))


def of_fairness(fairness: Fairness) -> Iterator[Figure]:
    """The limits apply to the worst repeat."""
    gap, step, short = (
        spread(values) for values in (fairness.longest_gap_s, fairness.quiet_step_s, fairness.short_first_token_s)
    )
    limit = max(GAP_LIMIT_S, GAP_LIMIT_STEPS * step.median)
    yield Figure("longest gap of 8 rows while a long prompt prefills", "s", gap, gap.high, limit)
    steps = ratios(fairness.longest_gap_s, fairness.quiet_step_s)
    yield Figure("the same, in undisturbed median steps", "steps", steps, steps.high)
    yield Figure("first token of a short request meanwhile", "s", short, short.high, SHORT_LIMIT_S)
    yield Figure("first token of the long prompt", "s", *reported(fairness.long_first_token_s))
    yield errors("our errors, fairness", len(fairness.errors))


def of_memory(name: str, memory: Memory, bytes_per_token: int) -> Iterator[Figure]:
    """Cached prefixes take memory that nothing else needs, so the limit allows for them once."""
    needed = KV_FACTOR * memory.kv_tokens_at_peak * bytes_per_token + memory.kv_cached_at_peak
    limit = (needed + MEMORY_ALLOWANCE) / 1e6
    yield Figure(f"MLX peak above weights, {name}", "MB", *reported([memory.above_weights_bytes / 1e6]), limit)
    yield Figure(f"process resident, {name}", "MB", *reported([memory.resident_bytes_most / 1e6]))
