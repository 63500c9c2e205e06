"""A base model: how its part of the engine is built whenever it is loaded, and what is kept while it is unloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.app.adapters import KnownAdapters, find_adapters
from mlx_parallm.app.base_paths import BasePath, base_of_adapter
from mlx_parallm.app.device import SharedDevice, build_runner, device_schedule, kv_layout, mlx_limits
from mlx_parallm.batch.attention import AttentionChoice
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Config
from mlx_parallm.core.device import TrainingWork
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.draft_loading import build_draft_model, load_draft_model, sources_of
from mlx_parallm.engine.draft_loading import weight_bytes as draft_bytes
from mlx_parallm.engine.draft_model import DraftModel
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.scheduler import SchedulerConfig
from mlx_parallm.engine.speculate import Source
from mlx_parallm.engine.startup import Prover, calibrate, calibrate_steps, choose_attention
from mlx_parallm.engine.text import Vocabulary
from mlx_parallm.engine.thread import Loading
from mlx_parallm.errors import ConfigError
from mlx_parallm.kv.disk import PrefixStore
from mlx_parallm.model.device import on_cpu
from mlx_parallm.model.loading import LoadedModel, load, materializing
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.mtp import PredictionHead
from mlx_parallm.model.tokenizer import Tokenizer, detokenizer_for

_BANK_SHARE = 0.75
"""Largest part of the memory for requests and training that the adapter bank may take. Rows need the rest."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a base model has on the device while it is loaded. `sources`: where drafts come from. `draft`: its
    draft model, if that is another model, or its prediction head."""

    manager: SharedModelManager
    bank: AdapterBank
    runner: BatchRunner
    store: AdapterStore
    sources: frozenset[Source]
    draft: SharedModelManager | PredictionHead | None


class BaseModel:
    """One base model.

    Attributes:
        card, tokenizer, adapters, known: set when it is loaded for the first time, and kept from then on.
    """

    card: ModelCard
    tokenizer: Tokenizer
    adapters: AdapterService
    known: KnownAdapters

    def __init__(self, at: BasePath, shared: SharedDevice) -> None:
        self.at, self.name = at, at.name
        self.first = at is shared.bases[0]
        self._shared, self._config = shared, shared.config
        self._cost: CostModel | None = None
        self._attention = AttentionChoice()
        self._prefix_store: PrefixStore | None = None

    @property
    def described(self) -> bool:
        """Whether it has been loaded before, so that `card` and the others are set."""
        return hasattr(self, "card")

    # -- on the device thread --------------------------------------------------------------------

    def open(self) -> LoadedModel:
        """The model with lazy weights, which take no memory yet."""
        return load(
            self.at.path,
            dequantize=on_cpu(),
            trust_remote_code=self._config.model.trust_remote_code,
            progress=False,
        )

    def loading(self) -> Loading:
        """Loads the weights, one tensor at a time, and builds the parts of the engine."""
        loaded = self.open()
        for _ in materializing(loaded.model, self.name, show=True):
            yield
        before = list(self._shared.memories)
        built = self.build(self._manager(loaded))
        try:
            return self.parts(built)
        except BaseException:  # whatever it is: the others must not count its memory, nor that of its draft model
            for memory in [each for each in self._shared.memories if each not in before]:
                memory.leave()
            built.store.unload()
            raise

    def build(self, manager: SharedModelManager | None = None) -> Built:
        """What the base model has on the device. `manager`: None loads it in one go.

        Raises:
            ModelError, ConfigError: it cannot be loaded, or cannot be used with this configuration.
        """
        config, shared = self._config, self._shared
        manager = manager or self._manager()
        draft = load_draft_model(manager, config)
        sources = sources_of(config, manager, has_head=isinstance(draft, PredictionHead))
        memory = shared.open_memory(manager.card.weight_bytes + draft_bytes(draft))
        try:
            limit = int(_BANK_SHARE * memory.budget_bytes)
            bank = manager.install_bank(
                config.adapters.max_loras,
                config.adapters.max_lora_rank,
                limit,
                shared.parts.linear_group(manager.split),
            )
            runner = build_runner(manager, bank, config, memory, self.first, shared.parts)
            if self.described:
                store = self._open_store(bank)
                self.adapters.attach(store)
            else:
                store = self._describe(manager, bank, runner)
        except BaseException:  # whatever it is: the others must not count its memory
            memory.leave()
            raise
        return Built(manager, bank, runner, store, sources, draft)

    def _open_store(self, bank: AdapterBank) -> AdapterStore:
        return self.known.store(bank, self._config.adapters.max_cpu_loras, self._shared.processor.wake)

    def _manager(self, loaded: LoadedModel | None = None) -> SharedModelManager:
        model = self._config.model
        return SharedModelManager(
            self.at.path,
            trust_remote_code=model.trust_remote_code,
            allow_special_tokens=model.allow_special_tokens,
            tool_parser=model.tool_parser,
            reasoning_parser=model.reasoning_parser,
            template_variables=json.loads(model.chat_template_kwargs or "{}"),
            progress=loaded is None and self._config.server.log_format == "text",
            loaded=loaded,
            split=self._shared.parts.split,
        )

    def _describe(self, manager: SharedModelManager, bank: AdapterBank, runner: BatchRunner) -> AdapterStore:
        """Sets what is kept from now on. Returns the store of its adapters."""
        config, shared = self._config, self._shared
        aliases = config.server.served_model_name[1:] if self.first else ()
        context = runner.cache.longest_row
        card = replace(manager.card, name=self.name, aliases=tuple(aliases), context_length=context)
        self.known = find_adapters(manager, config, shared.run, card.names, self._has_adapter, self.first)
        reserved = frozenset({*card.names, *(base.name for base in shared.bases)})
        folder = config.adapters.serve_folder if self.first else None
        store = self._open_store(bank)
        self.adapters = AdapterService(shared.processor, store, self.known.library, reserved, folder)
        self.tokenizer, self.card = manager.tokenizer, card
        return store

    def _has_adapter(self, folder: Path) -> bool:
        return base_of_adapter(folder, self._shared.bases) == self.name

    def parts(self, built: Built, work: TrainingWork | None = None) -> EngineParts:
        """The parts of the engine. `work`: of training, if this base model trains."""
        config, sources = self._config, built.sources
        cost = self._measured(built, steps=bool(sources))
        return EngineParts(
            built.runner,
            built.store,
            Vocabulary(self.card.vocab_size, self.tokenizer.eos_token_ids, detokenizer_for(self.tokenizer)),
            SchedulerConfig(
                max_rows=config.server.max_batch_size,
                max_batched_tokens=config.server.max_batched_tokens,
                schedule=device_schedule(config, on_cpu()),
            ),
            cost,
            work,
            lookahead=self._lookahead,
            draft_sources=sources,
            draft_model=self._draft_model(built) if Source.MODEL in sources else None,
            trace=config.debug.trace if self.first else None,
            check_every_unit=config.debug.check_every_unit,
            queue_timeout_s=config.server.queue_timeout,
            limits=mlx_limits(config),
            prefix_store=self._opened_prefix_store(built.manager),
            base=self.name,
        )

    @property
    def _lookahead(self) -> bool:
        """See `EngineParts`. Several ranks get the tokens of each pass from the host, so they cannot look ahead."""
        if self._shared.parts.split is not None:
            return False
        return not on_cpu() if self._config.debug.lookahead is None else self._config.debug.lookahead

    def _draft_model(self, built: Built) -> DraftModel:
        assert built.draft is not None
        memories, keep = self._shared.memories, self._config.server.prefix_cache
        return build_draft_model(built.manager, built.bank, built.runner, built.draft, memories, keep)

    def _measured(self, built: Built, steps: bool) -> CostModel:
        """The cost model. It is measured when the base model is first loaded, as is the faster kind of attention.
        `steps`: with units of a few tokens, as drafts make them; on a GPU with them in any case."""
        runner, manager = built.runner, built.manager
        if self._cost is None:
            check = self._shared.processor.raise_if_stopped
            prover = Prover(manager.model, built.bank, manager.plan, runner)
            choose_attention(runner, self._config.server.attention, prover)
            self._attention, self._cost = runner.attention, calibrate(runner, check)
            if steps or not on_cpu():
                self._cost = calibrate_steps(runner, self._cost, check)
        runner.attention = self._attention
        return self._cost

    def _opened_prefix_store(self, manager: SharedModelManager) -> PrefixStore | None:
        if self._prefix_store is None:
            self._prefix_store = build_prefix_store(manager, self._config, self._shared.processor.wake)
        return self._prefix_store


def weight_bytes(loaded: LoadedModel) -> int:
    """The memory that the weights will take."""
    return sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))


def build_prefix_store(manager: SharedModelManager, config: Config, wake: Callable[[], None]) -> PrefixStore | None:
    """The files of the prefix cache, None if it is kept in memory only. `wake`: see `PrefixStore`.

    Raises:
        ConfigError: the folder cannot be used, there is no prefix cache, or the model has caches of its own.
    """
    folder = config.server.prefix_cache_dir
    if folder is None:
        return None
    if not config.server.prefix_cache:
        raise ConfigError("--prefix-cache-dir keeps the prefix cache on the disk; leave --no-prefix-cache out")
    if manager.plan.layout.opaque:
        raise ConfigError(
            f"--prefix-cache-dir keeps the prefix cache on the disk, and {manager.card.name} ({manager.family.name}) "
            "has caches of its own, for which there is none; leave it out"
        )
    worker = ThreadPoolExecutor(1, thread_name_prefix="prefix-cache")
    try:
        return PrefixStore(
            folder, manager.fingerprint, kv_layout(manager, config), config.server.prefix_cache_disk, worker, wake
        )
    except OSError as error:
        raise ConfigError(
            f"cached prefixes cannot be kept in {folder} ({error.strerror}): give --prefix-cache-dir a folder that "
            "this user can write"
        ) from error
