"""A server whose model is split over several machines, each of which runs the same command under `mlx.launch`.

rank 0    speaks HTTP, schedules and samples      `Lead`
others    repeat what rank 0 does to its arrays   `follow`
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.app.base_paths import base_paths
from mlx_parallm.app.device import build_runner, kv_budget, mlx_limits
from mlx_parallm.config import Config
from mlx_parallm.errors import ConfigError, DeviceLostError
from mlx_parallm.extras.ranks.follower import Follower
from mlx_parallm.extras.ranks.joining import Ranks
from mlx_parallm.extras.ranks.leader import Leader
from mlx_parallm.extras.ranks.parts import FollowingParts, LeadingParts
from mlx_parallm.extras.ranks.training import FollowingTraining
from mlx_parallm.extras.ranks.watchdog import Watchdog
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.model.device import on_cpu, set_limits
from mlx_parallm.model.loading import load
from mlx_parallm.model.manager import SharedModelManager

_GRACE_S = 1.0
"""How long rank 0 takes to tell its clients that a rank is lost, in seconds, before the process ends."""

_log = logging.getLogger(__name__)


def check_splittable(config: Config) -> None:
    """Raises ConfigError: a setting does not work with a model that is split over several machines."""
    if problems := list(_problems(config)):
        raise ConfigError("\n".join(f"{problem} with a model over several machines" for problem in problems))


def _problems(config: Config) -> Iterator[str]:
    if config.model.other_base_models:
        yield "model.other_base_models: only one base model can be served"
    if config.cluster.wanted:
        yield "cluster: the server cannot be a node of a cluster"
    if config.server.supervise:
        yield "server.supervise: a server alone cannot be started again"
    if config.model.draft_model is not None:
        yield "model.draft_model: a draft model cannot be used"
    if config.server.kv_bits is not None:
        yield "server.kv_bits: keys and values cannot be quantized"
    if config.server.prefix_cache_dir is not None:
        yield "server.prefix_cache_dir: the prefix cache cannot be kept on the disk"


class Lead:
    """The other ranks, as rank 0 has them while it serves.

    `parts`: the parts of rank 0's engine.

    Args:
        lose: fails all requests with this reason.
    """

    def __init__(self, ranks: Ranks, lose: Callable[[str], None]) -> None:
        self._lose = lose
        self._leader = Leader(ranks.peers)
        self.parts = LeadingParts(ranks.group, self._leader)
        self._watchdogs = [Watchdog(peer, self._lost) for peer in ranks.peers]
        for watchdog in self._watchdogs:
            watchdog.start()

    def stop(self) -> None:
        """Ends the other ranks."""
        for watchdog in self._watchdogs:
            watchdog.stop()
        self._leader.stop()

    def _lost(self, reason: str) -> None:
        """Ends the process. The device thread may wait for the lost rank without end."""
        self._lose(f"{reason}; the server ends, start all ranks again")
        time.sleep(_GRACE_S)
        _exit(reason)


def follow(config: Config, ranks: Ranks) -> int:
    """Repeats what rank 0 does until it stops; returns the process's exit code.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or cannot be split.
        DeviceLostError: rank 0 is lost.
    """
    (leader,) = ranks.peers
    for number in (signal.SIGINT, signal.SIGTERM):  # a launcher sends them to all ranks; rank 0 finishes its requests
        signal.signal(number, signal.SIG_IGN)
    watchdog = Watchdog(leader, _exit)
    watchdog.start()
    follower = _build(config, FollowingParts(ranks.group))
    _log.info("rank %d is ready", ranks.group.rank())
    try:
        follower.follow(leader.work)
    except ConnectionError as error:
        raise DeviceLostError(f"rank 0 is lost: {error}") from error
    finally:
        watchdog.stop()
    return 0


def _build(config: Config, parts: FollowingParts) -> Follower:
    set_limits(mlx_limits(config))
    (base,) = base_paths(config)
    model = config.model
    loaded = load(base.path, dequantize=on_cpu(), trust_remote_code=model.trust_remote_code, progress=False)
    manager = SharedModelManager(base.path, progress=False, loaded=loaded, split=parts.split)
    adapters = config.adapters
    bank = manager.install_bank(
        adapters.max_loras, adapters.max_lora_rank, make_group=parts.linear_group(manager.split)
    )
    device = DeviceMemory(kv_budget(manager.card.weight_bytes, config))
    runner = build_runner(manager, bank, config, device, parts=parts)
    return Follower(runner, bank, following_training(manager, bank) if config.rl_training.enabled else None)


def _exit(reason: str) -> None:
    """Ends this process at once, whatever its other threads wait for."""
    print(f"error: {reason}; start all ranks again", file=sys.stderr, flush=True)
    os._exit(1)


def following_training(manager: SharedModelManager, bank: AdapterBank) -> FollowingTraining:
    """What a rank other than 0 does of the training. Raises UnsupportedModelError: the model cannot be trained."""
    assert manager.split is not None
    return FollowingTraining(manager.model, bank, manager.plan, manager.split)
