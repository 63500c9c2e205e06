"""Trains a reward model on a file of preferences, in a process of its own, without HTTP and without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.app.device import device_schedule, kv_budget, mlx_limits
from mlx_parallm.app.parts import Parts
from mlx_parallm.app.training import footprint_of, micro_steps_sized, trainable
from mlx_parallm.config import Config
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.reward_models.folder import RewardModelFolder
from mlx_parallm.extras.reward_models.learning import FitResult, FitSettings, OnStep, RewardModelDevice, fit
from mlx_parallm.extras.reward_models.preference_files import read_preferences
from mlx_parallm.extras.reward_models.preferences import split
from mlx_parallm.model.device import on_cpu, set_limits
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.train.trainer import GRPOTrainer

_PREFERENCES, _HELD_OUT = "--preferences", "--held-out"


@dataclass(frozen=True, slots=True)
class PreferenceSources:
    """Where the preferences come from.

    Attributes:
        preferences: a file, or a data set of the hub.
        held_out: a share of the prompts, 0 to 1, or another file whose preferences say how well it agrees.
    """

    preferences: str
    held_out: float | str = 0.1


def train_reward_model(
    config: Config, name: str, sources: PreferenceSources, settings: FitSettings, on_step: OnStep
) -> tuple[Path, FitResult]:
    """Trains a reward model and writes its folder, of this name, in `adapters.adapter_dir`. All of it happens on the
    calling thread.

    Returns:
        The folder, and what came of the training.

    Raises:
        ConfigError: a file or a setting cannot be used.
        ConflictError: there is a reward model or an adapter of this name.
        ParaLLMError: the model cannot be loaded or trained, or the folder cannot be written.
    """
    RewardModelFolder(config.adapters.adapter_dir).check_new(name)
    set_limits(mlx_limits(config))
    manager = SharedModelManager(
        config.model.base_model_path,
        trust_remote_code=config.model.trust_remote_code,
        allow_special_tokens=config.model.allow_special_tokens,
        tool_parser=config.model.tool_parser,
        reasoning_parser=config.model.reasoning_parser,
        template_variables=json.loads(config.model.chat_template_kwargs or "{}"),
    )
    tokenizer, context_length = manager.tokenizer, manager.card.context_length
    preferences = read_preferences(sources.preferences, tokenizer, context_length, _PREFERENCES)
    if isinstance(sources.held_out, str):
        held_out = read_preferences(sources.held_out, tokenizer, context_length, _HELD_OUT)
    else:
        try:
            preferences, held_out = split(preferences, sources.held_out, settings.seed)
        except ValueError as error:
            raise ConfigError(f"{_HELD_OUT}: {error}") from error
    trainer = _trainer(manager, config)
    device = RewardModelDevice(_ThisThread(trainer), trainer)
    model, result = asyncio.run(fit(device, preferences, held_out, config.model, settings, on_step))
    folder = RewardModelFolder(config.adapters.adapter_dir, manager.fingerprint)
    return folder.save(name, model.weights(), manager.adapter_layout, result.metrics), result


def _trainer(manager: SharedModelManager, config: Config) -> GRPOTrainer:
    bank = manager.install_bank(slots=0, max_rank=1)
    memory = kv_budget(manager.card.weight_bytes, config)
    stall_s = device_schedule(config, on_cpu()).max_decode_stall_s
    footprint = footprint_of(manager.model, manager.plan, bank)
    training = micro_steps_sized(config.rl_training, footprint, manager, memory, stall_s)
    return GRPOTrainer(trainable(training, footprint, manager, bank, memory, Parts()), training, config.model)


class _ThisThread:
    """Implements `core.DeviceThread` where nothing else uses the device: units run on the event loop's own thread."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    async def run(self, call: Callable[[], Any]) -> Any:
        result = call()
        if not isinstance(result, Future):
            return result
        while not result.done():
            self._trainer.advance()
            await asyncio.sleep(0)  # lets Ctrl-C end the process
        return result.result()
