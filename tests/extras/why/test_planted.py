"""One known trajectory teaches an answer, among many others: it is among the first five that pushed the answer."""

from __future__ import annotations

import numpy as np
import pytest
from configs import changed, loss_config
from trainers import SETTINGS, finish, make_trainer

from mlx_parallm.config import Algorithm
from mlx_parallm.extras.why.influence import Pushes, Term, Weights, alone, influences
from mlx_parallm.train.data import Datum, UpdateBatch, answered
from mlx_parallm.train.losses import UpdateTotals

CASES, UPDATES, GROUPS, SIZE, FIRST = 10, 5, 4, 4, 5


def batches(case: int) -> tuple[list[list[Datum]], Datum, Datum]:
    """The data of each update: groups of answers to a prompt, one of which is the best. The planted one is in the group
    that one update has more. Also an answer to another prompt, which nothing has taught."""
    dice = np.random.default_rng(case)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(int(token) for token in dice.integers(0, 250, length))

    def group(number: int) -> list[Datum]:
        prompt = ids(6)
        values = [1.5] + [-0.5] * (SIZE - 1)
        return [answered(prompt, ids(4), advantage=value, group=number) for value in values]

    updates = [[datum for number in range(GROUPS) for datum in group(number)] for _ in range(UPDATES)]
    planted = group(GROUPS)
    updates[case % UPDATES] += planted
    return updates, planted[0], answered(ids(6), ids(4))


@pytest.mark.parametrize("algorithm", [pytest.param(Algorithm.GRPO, marks=pytest.mark.ci), Algorithm.CROSS_ENTROPY])
def test_a_planted_trajectory_is_found(algorithm: Algorithm) -> None:
    """At least in eight of ten cases, by the cosine; and no more often than by chance for an answer that nothing has
    taught."""
    loss = loss_config(algorithm)
    trainer, _ = make_trainer(changed(SETTINGS, loss=loss, learning_rate=3e-3, micro_batch_tokens=512))
    found, control = 0, 0
    for case in range(CASES):
        policy = trainer.open("one", seed=case)
        updates, planted, unrelated = batches(case)
        terms: list[Term] = []
        for data in updates:
            learnt = [datum for datum in data if algorithm is Algorithm.GRPO or max(datum.advantages) > 0]
            finish(trainer, trainer.begin(policy, UpdateBatch(tuple(learnt))))
            terms += [Term([datum], alone(loss), UpdateTotals.of(learnt), 1.0) for datum in learnt]
        place = next(at for at, term in enumerate(terms) if term.data[0] is planted)

        def among_first(pushes: Pushes, place: int = place) -> bool:
            cosines = [push.cosine for push in pushes.pushes]
            return sorted(cosines, reverse=True).index(cosines[place]) < FIRST

        asked = [trainer.run(influences(trainer, Weights(policy.state), each, terms)) for each in (planted, unrelated)]
        of_answer, of_control = finish(trainer, *asked)
        found += among_first(of_answer)
        control += among_first(of_control)
    assert found >= 8
    assert control <= 5, f"by chance {CASES * FIRST / len(terms):.1f} are expected"
