"""Reward models of the preferences that a run has collected, on a tiny model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from extras.reward_models.test_arithmetic import made
from extras.reward_models.test_scoring import Device
from rl.scoring_rig import group
from trainers import LORA

from mlx_parallm.core.requests import CollectionSpec, Signal
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.reward_models.cards import RewardModelSpec
from mlx_parallm.extras.reward_models.folder import RewardModelFolder
from mlx_parallm.extras.reward_models.learning import RewardModelDevice
from mlx_parallm.extras.reward_models.service import RewardModels
from mlx_parallm.extras.reward_models.trainer import RewardModelTrainer
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.store import JournalFile

LOUD, QUIET, END = 40, 41, 257
TOKENIZER = SimpleNamespace(eos_token_ids=frozenset({END}), eos_token="<end>", token_string=lambda _: "<end>")
SPEC = RewardModelSpec("loud", held_out=0.25, epochs=3, batch_size=4, learning_rate=0.01, seed=0)


def edit(number: int, signal: Signal = Signal.PREFERENCES) -> list[Trajectory]:
    """A preference for an answer that ends with LOUD."""
    group_id = f"{signal.value}-{number}"
    collection = CollectionSpec(signal.value, {}, signal=signal)
    answers = [(which, (100 + number, last, END)) for which, last in (("chosen", LOUD), ("rejected", QUIET))]
    return [
        replace(
            each,
            group_id=group_id,
            trajectory_id=f"{group_id}-{which}",
            prompt_ids=(1, number),
            completion_ids=ids,
            sampling_logprobs=(),
            collection=collection,
        )
        for each, (which, ids) in zip(group("", "", ""), answers, strict=True)
    ]


@pytest.fixture
async def run(tmp_path: Path):
    """The trainer, the journal that it reads, and the folder of its reward models."""
    device_trainer, _ = made()
    journal, folder = Journal(JournalFile(tmp_path / "journal.sqlite")), RewardModelFolder(tmp_path / "adapters")
    models = RewardModels(RewardModelDevice(Device(device_trainer), device_trainer), folder, TOKENIZER)
    yield RewardModelTrainer(models, journal, LORA), journal, folder
    await journal.close()


async def test_an_edit_that_was_replaced_and_other_signals_do_not_count(run: Any) -> None:
    trainer, journal, _ = run
    for number in range(6):
        await journal.accept("one", edit(number))
    await journal.accept("one", edit(7, Signal.CORRECTIONS))
    journal.dropped([each.trajectory_id for each in edit(2)], "replaced")
    card = await trainer.train(replace(SPEC, held_out=0.0))
    assert (card.preferences, card.held_out, card.held_out_agreement, card.held_out_low) == (5, 0, None, None)


async def test_one_reward_model_is_trained_at_a_time(run: Any) -> None:
    trainer, journal, folder = run
    await journal.accept("one", edit(0))
    first = asyncio.create_task(trainer.train(replace(SPEC, held_out=0.0)))
    await asyncio.sleep(0)
    with pytest.raises(ConflictError, match="wait until it has ended"):
        await trainer.train(replace(SPEC, name="other"))
    await first
    folder.check("loud")
