"""The base models of a process: which there are, what the device has room for, and how each one is built.

BasePath      a base model before it is loaded: `model.base_model_path` and `model.other_base_models`
SharedDevice  what the base models of a process share
BaseModel     builds its part of the engine whenever it is loaded, and keeps what needs no device memory while it is
              unloaded: its card, its tokenizer, and which adapters and versions there are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.files import read_config
from mlx_parallm.adapters.formats import CONFIG_FILE
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.runs import Run
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.app.adapters import KnownAdapters, find_adapters
from mlx_parallm.app.parts import Parts
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.config import Config
from mlx_parallm.core.device import MODE_SHARES, DeviceSchedule, TrainingWork
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.requests import WorkClass
from mlx_parallm.core.text import control_ids
from mlx_parallm.engine.budget import CostModel
from mlx_parallm.engine.draft_loading import build_draft_model, load_draft_model, sources_of
from mlx_parallm.engine.draft_model import DraftModel
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.model_check import prove_once
from mlx_parallm.engine.scheduler import SchedulerConfig
from mlx_parallm.engine.speculate import Source
from mlx_parallm.engine.startup import calibrate, calibrate_steps, choose_attention, prove
from mlx_parallm.engine.text import Vocabulary
from mlx_parallm.engine.thread import ContinuousBatchProcessor, Loading
from mlx_parallm.errors import AdapterFileError, ConfigError, UnsupportedModelError
from mlx_parallm.kv.device_memory import DeviceMemory, MemoryAccount, default_budget
from mlx_parallm.kv.disk import PrefixStore
from mlx_parallm.model.device import MemoryLimits, machine_memory, memory_limits, on_cpu
from mlx_parallm.model.layer_state import KVLayout
from mlx_parallm.model.loading import LoadedModel, load, materializing, name_of
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.tokenizer import Tokenizer, detokenizer_for

# ---- which base models there are -----------------------------------------------------------------

_BASE_KEYS = ("base_model_name_or_path", "model")
"""Keys of an adapter_config.json that name its base model: PEFT's and mlx-lm's."""


@dataclass(frozen=True, slots=True)
class BasePath:
    """A base model before it is loaded. `path`: a directory or a hub id; None for the bundled model."""

    path: str | None
    name: str


def base_paths(config: Config) -> tuple[BasePath, ...]:
    """The base models in the order of the configuration.

    Raises:
        ConfigError: two of them have the same name.
    """
    model = config.model
    given = (model.base_model_path, *model.other_base_models)
    bases = [BasePath(path, name_of(path)) for each in given for path in _models_of(each)]
    if config.server.served_model_name:
        bases[0] = BasePath(bases[0].path, config.server.served_model_name[0])
    names = [*(base.name for base in bases), *config.server.served_model_name[1:]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"--model-path: two base models are called {twice[0]!r}; rename a folder, or name the first with "
            "--served-model-name"
        )
    return tuple(bases)


def _models_of(path: str | None) -> Iterator[str | None]:
    folder = None if path is None else Path(path).expanduser()
    models: list[str] = []
    if folder is not None and folder.is_dir() and not (folder / "config.json").exists():
        models = sorted(str(sub) for sub in folder.iterdir() if (sub / "config.json").exists())
    yield from models or (path,)  # loading the path reports what is wrong with it


def base_of_adapter(folder: Path, bases: tuple[BasePath, ...]) -> str:
    """The name of the base model for which the adapter in `folder` was made: the first one that its files may mean, or
    the first of all if they name none of `bases`. Blocks on the disk."""
    return next(iter(bases_of_adapter(folder, bases)), bases[0].name)


def bases_of_adapter(folder: Path, bases: tuple[BasePath, ...]) -> tuple[str, ...]:
    """The names of the base models for which the adapter in `folder` may have been made, as its adapter_config.json
    says. Several only if the last part of a path is all that fits. Blocks on the disk."""
    if len(bases) == 1:
        return (bases[0].name,)
    try:
        settings = read_config(folder, None) if (folder / CONFIG_FILE).is_file() else {}
    except AdapterFileError:
        settings = {}  # loading the adapter reports what is wrong with it
    declared = next((settings[key] for key in _BASE_KEYS if isinstance(settings.get(key), str)), "")
    exactly = tuple(base.name for base in bases if declared in (base.name, base.path))
    last = Path(declared).name
    ends = {base.name: {Path(base.name).name, Path(base.path or base.name).name} for base in bases}
    return exactly[:1] or tuple(name for name, parts in ends.items() if last and last in parts)


# ---- the device that they share: memory and schedule ------------------------------------------------

_DECODE_STALL_S, _CPU_DECODE_STALL_S = 0.1, 0.5
"""Defaults of max_decode_stall_ms, in seconds. On a CPU, a single decode step takes most of 0.1 s."""


def mlx_limits(config: Config) -> MemoryLimits:
    """The memory that MLX may take on this device, as configured."""
    server = config.server
    return memory_limits(machine_memory(), server.mlx_memory_limit, server.mlx_cache_limit, server.wired_memory)


def build_runner(
    manager: SharedModelManager,
    bank: AdapterBank,
    config: Config,
    device: DeviceMemory | None = None,
    exact_length: bool = True,
    parts: Parts | None = None,
) -> BatchRunner:
    """The runner with its KV pool, checked for this architecture. On the device thread.

    Args:
        device: the accounts of the memory; None: those of a process that has this base model only.
        exact_length: `max_model_len` may not be longer than the model's own context. Otherwise the shorter one counts.
        parts: makes the runner and the memory of its KV pool; None: for a whole model.

    Raises:
        ConfigError: the memory budget does not hold one short row.
        UnsupportedModelError: the architecture cannot be batched, or its keys and values cannot be quantized as
            `kv_bits` says.
    """
    if manager.split is None:
        prove_once(manager, bank, config.model.trust_remote_code)
    layout, parts = kv_layout(manager, config), parts or Parts()
    device = device or DeviceMemory(kv_budget(manager.card.weight_bytes, config))
    weights = manager.card.weight_bytes
    device.open_account(MemoryAccount.WEIGHTS, lambda: weights)
    length = _context_length(manager.card, config, exact_length)
    cache = parts.cache(layout, device, length, config.server.prefix_cache, control_ids(manager.tokenizer))
    if not cache.longest_row:
        raise ConfigError(
            f"kv_cache_memory of {device.budget_bytes} bytes is less than one block of this model; "
            f"give at least {cache.smallest_budget}"
        )
    runner = parts.runner(manager.model, cache, bank, manager.plan)
    if manager.split is not None:
        prove(manager, bank, runner)
    return runner


def kv_layout(manager: SharedModelManager, config: Config) -> KVLayout:
    """The shape of keys and values, quantized if `kv_bits` says so.

    Raises:
        UnsupportedModelError: this model's cannot be quantized.
    """
    bits, plan = config.server.kv_bits, manager.plan
    if bits is None:
        return plan.layout
    if plan.in_parts & plan.layout.attention.keys():
        raise UnsupportedModelError(
            f"--kv-bits {bits} needs a model that leaves attention to this server, and {manager.card.name} "
            f"({manager.family.name}) has its own; leave --kv-bits out"
        )
    return plan.layout.quantized(bits)


def kv_budget(weight_bytes: int, config: Config, several: bool = False) -> int:
    """The memory that KV pools, adapters and training share: the configured budget or the default one, in bytes.

    Args:
        weight_bytes: of the base model that the process starts with.
        several: there are several base models, so that at least half of the memory is for weights.
    """
    limits, cpu_ram = mlx_limits(config), machine_memory().ram if on_cpu() else None
    weights = max(weight_bytes, limits.memory // 2) if several else weight_bytes
    return config.server.kv_cache_memory or default_budget(limits.memory, limits.cache, weights, cpu_ram)


def room_for_weights(budget: int, config: Config) -> int:
    """The memory that the weights of all loaded base models may take beside the KV cache, in bytes."""
    limits = mlx_limits(config)
    return limits.memory - limits.cache - budget


def _context_length(card: ModelCard, config: Config, exact: bool) -> int:
    wanted = config.model.max_model_len or card.context_length
    if not exact:
        return min(wanted, card.context_length)
    if wanted > card.context_length:
        raise ConfigError(f"max_model_len {wanted} is more than the model's context of {card.context_length}; lower it")
    return wanted


# -- scheduling ----------------------------------------------------------------------------------


def device_schedule(config: Config, cpu: bool) -> DeviceSchedule:
    """How the device is shared, with the defaults of the mode and the device. `cpu`: MLX computes on the CPU."""
    server = config.server
    mode_share = MODE_SHARES.get(server.mode.value, DeviceSchedule().training_time_share)
    stall_ms = server.max_decode_stall_ms
    return DeviceSchedule(
        training_time_share=config.rl_training.training_time_share or mode_share,
        max_decode_stall_s=stall_ms / 1000 if stall_ms else _CPU_DECODE_STALL_S if cpu else _DECODE_STALL_S,
        row_shares={
            WorkClass.INFERENCE: server.priority_ratios.inference,
            WorkClass.TRAINING: server.priority_ratios.training,
        },
    )


# ---- one base model -------------------------------------------------------------------------------

_BANK_SHARE = 0.75
"""Largest part of the memory for requests and training that the adapter bank may take. Rows need the rest."""


@dataclass
class SharedDevice:
    """What the base models of a process share.

    `parts`: makes the parts of an engine: for whole models, or for rank 0 of a model over several machines. `run`: the
    folder of the run, set before the first one is built.
    `budget`: bytes for KV pools, adapters and training, known when the first one is loaded. `memories`: of those that
    are loaded.
    """

    config: Config
    processor: ContinuousBatchProcessor
    bases: tuple[BasePath, ...]
    parts: Parts = field(default_factory=Parts)
    run: Run | None = None
    budget: int = 0
    memories: list[DeviceMemory] = field(default_factory=list)

    def open_memory(self, weight_bytes: int) -> DeviceMemory:
        """The accounts of one more base model. `weight_bytes`: its weights, and those of its draft model."""
        self.budget = self.budget or kv_budget(weight_bytes, self.config, several=len(self.bases) > 1)
        return DeviceMemory(self.budget, self.memories)


@dataclass(frozen=True, slots=True)
class Built:
    """What a base model has on the device while it is loaded. `sources`: where drafts come from. `draft`: its
    draft model, if that is another model."""

    manager: SharedModelManager
    bank: AdapterBank
    runner: BatchRunner
    store: AdapterStore
    sources: frozenset[Source]
    draft: SharedModelManager | None


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
        self._dense_rows = 0.0
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
        built = self.build(self._manager(loaded))
        return self.parts(built)

    def build(self, manager: SharedModelManager | None = None) -> Built:
        """What the base model has on the device. `manager`: None loads it in one go.

        Raises:
            ModelError, ConfigError: it cannot be loaded, or cannot be used with this configuration.
        """
        config, shared = self._config, self._shared
        manager = manager or self._manager()
        sources, draft = sources_of(config, manager), load_draft_model(manager, config)
        memory = shared.open_memory(manager.card.weight_bytes + (draft.card.weight_bytes if draft else 0))
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
        cost = self._measured(built.runner, steps=bool(sources))
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
            draft_model=self._draft_model(built, cost) if Source.MODEL in sources else None,
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

    def _draft_model(self, built: Built, cost: CostModel) -> DraftModel:
        memories, keep = self._shared.memories, self._config.server.prefix_cache
        return build_draft_model(built.manager, built.bank, built.runner, cost, built.draft, memories, keep)

    def _measured(self, runner: BatchRunner, steps: bool) -> CostModel:
        """The cost model. It is measured when the base model is first loaded, as is the faster kind of attention.
        `steps`: with units of a few tokens, as drafts make them."""
        if self._cost is None:
            check = self._shared.processor.raise_if_stopped
            choose_attention(runner)
            self._dense_rows, self._cost = runner.dense_rows, calibrate(runner, check)
            if steps:
                self._cost = calibrate_steps(runner, self._cost, check)
        runner.dense_rows = self._dense_rows
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
