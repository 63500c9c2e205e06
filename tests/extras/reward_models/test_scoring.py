"""Reward models as scorers: what requests may name, sums, faults, and the rewards of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from extras.reward_models.test_arithmetic import finished, made, moved, score
from rl.scoring_rig import LONG_S, group

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import InvalidRequestError, StepFailedError
from mlx_parallm.extras.reward_models.folder import RewardModelFolder
from mlx_parallm.extras.reward_models.learning import RewardModelDevice
from mlx_parallm.extras.reward_models.service import RewardModels
from mlx_parallm.rl.scoring.scorers import RewardSpec, read_reward
from mlx_parallm.rl.scoring.service import ScoringService
from mlx_parallm.train.trainer import GRPOTrainer

END = 257


class Known:
    """The reward model `rm` gives -1, -2, …; `broken` fails."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, name: str) -> None:
        self.asked.append(name)
        if name not in ("rm", "broken"):
            raise InvalidRequestError("there are rm, broken")

    async def rewards(self, name: str, group: Any) -> list[float]:
        if name == "broken":
            raise StepFailedError("the device is gone")
        return [-1.0 - at for at in range(len(group))]


@pytest.fixture
async def scoring():
    services: list[ScoringService] = []

    def make(reward: str | None = None, known: Known | None = None) -> ScoringService:
        spec = None if reward is None else RewardSpec(read_reward(reward))
        services.append(ScoringService(1, 32, LONG_S, spec, known or Known()))
        return services[-1]

    yield make
    for one in services:
        await one.close()


# ---- as scorers ----------------------------------------------------------------------------------


async def test_a_reward_model_scores_alone_and_in_a_sum(scoring: Callable[..., ScoringService]) -> None:
    service = scoring()
    assert await service.score(group("reward_model:rm", "x", "y")) == (-1.0, -2.0)
    mixed = group("0.5*reward_model:rm + 2*exact", "x", "y", answer="y")
    assert await service.score(mixed) == (-0.5, 1.0)


async def test_a_reward_model_in_the_configured_reward(scoring: Callable[..., ScoringService]) -> None:
    service = scoring("reward_model:rm + 0*length".replace("reward_model", "1*reward_model"))
    assert await service.score(group("reward", "x", "y", target_length=4)) == (-1.0, -2.0)


async def test_names_are_checked_with_the_request(scoring: Callable[..., ScoringService]) -> None:
    known = Known()
    service = scoring("0.5*reward_model:rm + 0.5*exact", known)
    for _ in range(2):
        await service.check(CollectionSpec("reward_model:rm"))
    assert known.asked == ["rm"]  # the disk is asked once
    await service.check(CollectionSpec("reward", {"answer": "x"}))
    with pytest.raises(InvalidRequestError, match="reward_model:other cannot be used: there are rm, broken"):
        await service.check(CollectionSpec("0.5*reward_model:other + 0.5*exact", {"answer": "x"}))
    with pytest.raises(InvalidRequestError, match=r"metadata\.answer"):
        await service.check(CollectionSpec("0.5*reward_model:rm + 0.5*exact"))
    with pytest.raises(InvalidRequestError, match="did you mean"):
        await service.check(CollectionSpec("reward_models:rm"))


# ---- on a tiny model -----------------------------------------------------------------------------


class Device:
    """Runs calls, and the trainer that they ask for, at once."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    async def run(self, call: Callable[[], Any]) -> Any:
        result = call()
        return finished(self.trainer, result) if isinstance(result, Future) else result


@pytest.fixture
def served(tmp_path: Path):
    """The reward models of a folder with `rm`, their trainer, and `rm` itself."""
    trainer, _ = made()
    folder = RewardModelFolder(tmp_path)
    model = moved(trainer)
    folder.save("rm", model.weights(), trainer.model.layout, {})
    tokenizer = SimpleNamespace(eos_token_ids=frozenset({END}), eos_token="<end>", token_string=lambda _: "<end>")
    return RewardModels(RewardModelDevice(Device(trainer), trainer), folder, tokenizer), trainer, model


async def test_rewards_are_those_of_the_whole_answer(served: Any) -> None:
    models, trainer, model = served
    answers = [
        replace(each, completion_ids=ids) for each, ids in zip(group("", "a", "b"), ((5, 6, END), (7,)), strict=True)
    ]
    want = finished(trainer, score(trainer, model, [(1, 2, 5, 6, END), (1, 2, 7, END)]))  # the second was cut off
    assert await models.rewards("rm", answers) == pytest.approx(want, abs=1e-5)
    assert abs(want[0] - want[1]) > 1e-3
