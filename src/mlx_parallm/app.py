"""The only place that builds the parts and ties them together: config in, a running server out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_parallm import BLAS
from mlx_parallm.batch.kv_cache import LoRABatchedKVCache
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.cli import banner
from mlx_parallm.config import Config
from mlx_parallm.core import ModelCard, WorkClass
from mlx_parallm.engine.calibrate import calibrate
from mlx_parallm.engine.live import Vocabulary
from mlx_parallm.engine.loop import EngineParts
from mlx_parallm.engine.offsets import check_unproved
from mlx_parallm.engine.processor import ContinuousBatchProcessor
from mlx_parallm.errors import ConfigError
from mlx_parallm.model.attention import install_hook
from mlx_parallm.model.detokenizer import Detokenizer
from mlx_parallm.model.device import device_name, on_cpu, ram_bytes, recommended_bytes
from mlx_parallm.model.layout import KVLayout
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.tokenizer import Tokenizer
from mlx_parallm.scheduler.rl_aware import SchedulerConfig
from mlx_parallm.server.app import create_app
from mlx_parallm.server.run import serve
from mlx_parallm.server.settings import LOOPBACK_HOSTS, ServerSettings

_CPU_SHARE = 0.25
"""Of RAM, for the KV pool on a CPU."""
_DEVICE_SHARE = 0.8
"""Of what the weights leave of the device's recommended working set, elsewhere."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the HTTP face needs of a loaded model. `card.context_length` is what the server can hold."""

    card: ModelCard
    tokenizer: Tokenizer
    device: str


class Engine:
    """A model, loaded on its own device thread and ready to generate."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._served: Served | None = None
        self.processor = ContinuousBatchProcessor(self._build, debug=config.server.debug)

    def start(self) -> Served:
        """Loads the model. Raises what loading raises: `ModelError`, `ConfigError`."""
        self.processor.start()
        assert self._served is not None
        return self._served

    def _build(self) -> EngineParts:
        manager = SharedModelManager.load(
            self._config.model.base_model_path, trust_remote_code=self._config.model.trust_remote_code
        )
        runner = build_runner(manager, self._config)
        card = _served_card(manager.card, runner, self._config)
        self._served = Served(card, manager.tokenizer, device_name())
        parts = EngineParts(runner, _vocabulary(manager), _scheduler_config(self._config), calibrate(runner))
        mx.reset_peak_memory()
        return parts


def run(config: Config) -> int:
    """Loads the model, serves until told to stop, and returns the process's exit code.

    Raises:
        ConfigError, ModelError: before anything is served.
    """
    logging.basicConfig(level=config.server.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    engine = Engine(config)
    served = engine.start()
    app = create_app(engine.processor, served.tokenizer, served.card, _server_settings(config))

    def announce(port: int) -> None:
        banner.show(_banner(config, served, engine.processor.stats().kv_bytes_budget, port))

    try:
        return serve(app, config.server.host, config.server.port, config.server.shutdown_timeout, announce)
    finally:
        engine.processor.stop()


def _server_settings(config: Config) -> ServerSettings:
    server = config.server
    return ServerSettings(
        api_key=server.api_key.get_secret_value() if server.api_key else None,
        allowed_hosts=(*LOOPBACK_HOSTS, server.host, *server.allowed_hosts),
        cors_origins=server.cors_origins,
        max_batch_size=server.max_batch_size,
        max_queued=server.max_queued,
        max_body_bytes=server.max_body_bytes,
    )


def _banner(config: Config, served: Served, kv_bytes: int, port: int) -> banner.BannerInfo:
    return banner.BannerInfo(
        model=served.card,
        adapters=(),
        kv_bytes=kv_bytes,
        device=served.device,
        blas=BLAS.name,
        host=config.server.host,
        port=port,
        authenticated=config.server.api_key is not None,
        warnings=() if BLAS.fast else (BLAS.problem,),
    )


def build_runner(manager: SharedModelManager, config: Config) -> BatchRunner:
    """The runner and its KV pool, proved for this architecture. On the device thread.

    Raises:
        ConfigError: the memory budget does not hold one short row.
        UnsupportedModelError: the architecture cannot be batched.
    """
    layout = KVLayout(manager.layers, manager.kv_dtype)
    budget = config.server.kv_cache_memory or _default_budget(manager.card)
    cache = LoRABatchedKVCache(layout, budget, _context_length(manager.card, config))
    if not cache.can_ever_hold(1):
        raise ConfigError(
            f"kv_cache_memory of {budget} bytes holds {cache.budget_tokens} tokens of this model; "
            f"give at least {cache.capacity_for(1) * layout.bytes_per_token}"
        )
    runner = BatchRunner(manager.model, cache, install_hook(manager.model), manager.card.vocab_size)
    check_unproved(manager, runner)
    return runner


def _context_length(card: ModelCard, config: Config) -> int:
    wanted = config.model.max_model_len or card.context_length
    if wanted > card.context_length:
        raise ConfigError(f"max_model_len {wanted} is more than the model's context of {card.context_length}; lower it")
    return wanted


def _default_budget(card: ModelCard) -> int:
    recommended = recommended_bytes()
    if on_cpu() or recommended is None:
        return int(_CPU_SHARE * ram_bytes())
    return int(_DEVICE_SHARE * max(recommended - card.weight_bytes, 0))


def _served_card(card: ModelCard, runner: BatchRunner, config: Config) -> ModelCard:
    return replace(
        card,
        name=config.server.served_model_name or card.name,
        context_length=runner.cache.longest_row,
    )


def _vocabulary(manager: SharedModelManager) -> Vocabulary:
    tokenizer = manager.tokenizer
    return Vocabulary(manager.card.vocab_size, tokenizer.eos_token_ids, lambda prompt: Detokenizer(tokenizer, prompt))


def _scheduler_config(config: Config) -> SchedulerConfig:
    ratios = config.server.priority_ratios
    return SchedulerConfig(
        max_rows=config.server.max_batch_size,
        max_batched_tokens=config.server.max_batched_tokens,
        priority_ratios={WorkClass.INFERENCE: ratios.inference, WorkClass.TRAINING: ratios.training},
    )
