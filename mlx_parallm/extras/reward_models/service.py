"""RewardModels: the reward models of a server, loaded when a scorer names them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from mlx_parallm.config import Config
from mlx_parallm.core.text import TextTokenizer, end_id
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.extras.reward_models.folder import RewardModelFolder
from mlx_parallm.extras.reward_models.learning import RewardModelDevice
from mlx_parallm.extras.reward_models.model import RewardModel
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.train.trainer import GRPOTrainer

MOST_LOADED = 4
"""Reward models in memory. The one that was used longest ago gives way."""

Stamp = tuple[int, int]


class RewardModels:
    """Event loop's thread only, except `check`.

    Attributes:
        device: computes their rewards.
        folder: has their files.
    """

    def __init__(self, device: RewardModelDevice, folder: RewardModelFolder, tokenizer: TextTokenizer) -> None:
        self.device, self.folder = device, folder
        self._end, self._ends = end_id(tokenizer), tokenizer.eos_token_ids
        self._loaded: OrderedDict[str, tuple[Stamp, RewardModel]] = OrderedDict()
        self._loading = asyncio.Lock()

    def check(self, name: str) -> None:
        """Raises InvalidRequestError: there is none of this name, or it cannot be used. Blocks on the disk."""
        self.folder.check(name)

    async def rewards(self, name: str, group: Sequence[Trajectory]) -> Sequence[float]:
        """The rewards of these answers, in order. Raises what `score` raises."""
        return await self.score(name, [each.prompt_ids + each.completion_ids for each in group])

    async def score(self, name: str, rows: Sequence[tuple[int, ...]]) -> Sequence[float]:
        """The rewards of rows, each a prompt with its answer.

        Raises:
            InvalidRequestError: it cannot be loaded.
            StepFailedError: they could not be computed.
        """
        return await self.device.score(await self._model(name), [self._ended(row) for row in rows])

    def _ended(self, row: tuple[int, ...]) -> tuple[int, ...]:
        """The row with the end-of-sequence token at its end, even if the answer was cut off: reward models know nothing
        of other ends."""
        return row if row[-1] in self._ends else (*row, self._end)

    async def _model(self, name: str) -> RewardModel:
        """The reward model of this name. It is read again when its folder has been replaced."""
        async with self._loading:
            stamp = await asyncio.to_thread(self.folder.stamp, name)
            known = self._loaded.get(name)
            if known is not None and known[0] == stamp:
                self._loaded.move_to_end(name)
                return known[1]
            model = await self._read(name)
            self._loaded[name] = (stamp, model)
            self._loaded.move_to_end(name)
            if len(self._loaded) > MOST_LOADED:
                self._loaded.popitem(last=False)
            return model

    async def _read(self, name: str) -> RewardModel:
        trainer = self.device.trainer
        weights = await asyncio.to_thread(self.folder.load, name, trainer.model.layout)

        def to_device() -> RewardModel:
            model = RewardModel.of(weights)
            trainer.hold(model)
            return model

        return await self.device.device.run(to_device)


def open_models(
    processor: ContinuousBatchProcessor, trainer: GRPOTrainer, manager: SharedModelManager, config: Config
) -> RewardModels:
    """The reward models of the adapter folder, which the trainer scores with and trains."""
    folder = RewardModelFolder(config.adapters.adapter_dir, manager.fingerprint)
    return RewardModels(RewardModelDevice(processor, trainer), folder, manager.tokenizer)
