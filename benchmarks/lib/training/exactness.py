"""Compares what the trainer computes of episodes with plain forwards of mlx-lm, on the bundled model.

The episodes have two turns; what they begin with is shared, tokens that nobody drew have the weight 0, and every drawn
token has an advantage of its own. The plain trainer pads each episode and shares nothing.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from benchmarks.lib.training.plain import plain_trainer
from benchmarks.lib.training.update import Ours, difference, random_factors
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.train.data import Datum

GROUPS, GROUP = 2, 4
SHARING = 3
"""Episodes of each group whose first turn is the same."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """`logprob`: largest difference of a drawn token's logprob, in nats. `gradient`: norm of the difference of all
    gradients, relative to the plain ones. `tokens`: of all episodes; `computed`: of these, what sharing leaves.
    """

    logprob: float
    gradient: float
    tokens: int
    computed: int


def measure() -> Exactness:
    """Runs the comparison in this process."""
    manager = SharedModelManager(progress=False)
    ours = Ours(manager, manager.install_bank(1, 16), checkpointing=True)
    plain = plain_trainer(SharedModelManager(progress=False).model)
    factors, drawn = random_factors(ours.policy.params), list(episodes())

    ours.policy.restore(replace(ours.policy.state, params=factors))
    logprobs = ours.trainer.logprobs(ours.policy, drawn)
    while ours.trainer.waits():
        ours.trainer.advance()
    plain.put(factors)
    apart = [_apart(got, plain.logprobs(each)) for got, each in zip(logprobs.result(), drawn, strict=True)]

    ours.update(factors, drawn)
    gradient = difference(ours.gradients, plain.update(drawn, checkpointed=False, precise=True))
    return Exactness(max(apart), gradient, sum(len(each.token_ids) for each in drawn), ours.computed_tokens)


def _apart(ours: Sequence[float], plain: mx.array) -> float:
    return float(mx.abs(mx.array(ours) - plain).max().item())


def episodes() -> Iterator[Datum]:
    """Groups of episodes: system and user, a drawn turn, a tool's result, and another drawn turn of another weight."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(count)]

    system = ids(20)
    for group in range(GROUPS):
        user, turn, result = ids(30), ids(14), ids(12)
        for number in range(GROUP):
            if number >= SHARING:
                turn, result = ids(9), ids(8)
            last = ids(6 + 5 * number)
            context = len(system) + len(user)
            tokens = (*system, *user, *turn, *result, *last)
            weights = (0.0,) * context + (1.0,) * len(turn) + (0.0,) * len(result) + (0.5,) * len(last)
            yield Datum(tokens, weights, tuple(rng.gauss(0, 1) for _ in tokens), group=group)
