"""Builds the parts of a server from its configuration, in this order:

configuration → memory limits → base model → adapter bank → KV pool and runner → adapters → training → engine
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_parallm.adapters.runs import JOURNAL, METRICS, Run, open_run
from mlx_parallm.adapters.service import AdapterService
from mlx_parallm.app.adapters import KnownAdapters
from mlx_parallm.app.base_model import BaseModel, Built
from mlx_parallm.app.base_paths import base_paths
from mlx_parallm.app.checks import check
from mlx_parallm.app.device import SharedDevice, device_schedule, mlx_limits
from mlx_parallm.app.parts import Parts
from mlx_parallm.app.training import TrainingInputs, build_trainer, build_training
from mlx_parallm.config import Config
from mlx_parallm.core.device import TrainingWork
from mlx_parallm.core.engine import EngineClient, ModelCard
from mlx_parallm.core.requests import Event, GenerationRequest
from mlx_parallm.engine.engine import EngineParts
from mlx_parallm.engine.machine_watch import MachineWatch
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import StorageError
from mlx_parallm.extras_table import find, needed, offered
from mlx_parallm.machine.processors import BlasThreads
from mlx_parallm.model.device import MemoryLimits, device_name, on_cpu, set_limits
from mlx_parallm.model.loading import find_model
from mlx_parallm.model.tokenizer import Tokenizer
from mlx_parallm.rl.rollouts.answers import InferenceEngine, SharedEngine
from mlx_parallm.rl.rollouts.environment import check_inference
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.record import RunFile, RunState, read_record
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.service import TrainingService
from mlx_parallm.rl.tracking import JsonlTracker, Tracker, Tracking

if TYPE_CHECKING:
    from mlx_parallm.extras.ranks.joining import Ranks
    from mlx_parallm.extras.ranks.running import Lead

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model, as the HTTP server and the train command use it.

    card: the base model; its `context_length` is the longest sequence that the server can hold
    limits: the memory that MLX may take
    engine: answers generation requests
    training: None if the server does not train
    run: the folder of checkpoints; None if no checkpoints are saved
    known: the adapters of the base model
    others: names of the other base models, which are loaded when they are asked for
    """

    card: ModelCard
    tokenizer: Tokenizer
    device: str
    limits: MemoryLimits
    adapters: AdapterService
    engine: EngineClient
    training: TrainingService | None
    run: Run | None
    known: KnownAdapters
    others: tuple[str, ...] = ()

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Answers a request (see `core.EngineClient`), and collects it for training if it has a `collection`."""
        events = self.engine.generate(request)
        if self.training is None or request.collection is None:
            return events
        return self.training.trajectories.collect(request, events)


def ranks_of(config: Config) -> Ranks | None:
    """The processes that `mlx.launch` has started, among which the model is split; None: there is this one only.

    Raises:
        ConfigError: the configuration asks for what a split model cannot do.
    """
    extra = find("ranks")
    ranks: Ranks | None = None if extra is None else extra.joined(config)
    return ranks


def follow(config: Config, ranks: Ranks) -> int:
    """Computes with rank 0 until it ends; returns the process's exit code."""
    exit_code: int = needed("ranks.running", "mlx.launch").follow(config, ranks)
    return exit_code


def inference_engine(config: Config, served: Served, cluster: InferenceEngine | None = None) -> InferenceEngine:
    """What samples the rollouts of a run: this process, an outside engine, or the nodes of a cluster.

    Args:
        cluster: samples on the nodes of the cluster that is trained for, in place of this process. An outside engine is
            one more node then.

    Raises:
        ConfigError: nothing could sample.
    """
    check_inference(config)
    if cluster is None and not config.inference.engine.outside:
        return SharedEngine(served.engine)
    outside: InferenceEngine = needed("engines.building", "inference.engine").outside_engine(config, served, cluster)
    return outside


def start_tracking(config: Config, run: Run, log: Path | None = None) -> Tracking:
    """The trackers that the configuration names, and the JSONL file: `log`, or metrics.jsonl in the run's folder."""
    opened: dict[str, Callable[[], Tracker]] = {"jsonl": partial(JsonlTracker, metrics_file(run, log))}
    if wanted := config.rl_training.trackers:
        extra = needed("trackers", "rl_training.trackers")
        shown = config.model_dump(mode="json", include={"model", "rl_training"})
        tracked = extra.TrackedRun(run.path, run.id, run.path.name, config.adapters.default_adapter, shown)
        opened |= extra.trackers_of(tracked, wanted)
    return Tracking(opened)


def metrics_file(run: Run, log: Path | None = None) -> Path:
    """The JSONL file of a run."""
    return log or run.path / METRICS


class RunningEngine:
    """The device thread with the first base model, ready to generate between `start` and `stop`.

    `bases`: all base models of the configuration. `shared`: what they share. `load_seconds`: how long it took to load
    the first one. `watch`: of the machine; its user runs it.
    """

    def __init__(self, config: Config, command: Mapping[str, Any] | None = None, ranks: Ranks | None = None) -> None:
        """`command`: what the run is for, in its record; see `rl.runs.record.RunRecord`. `ranks`: those that the model
        is split among, of which this is rank 0; None if it is whole."""
        self.config = config
        self.load_seconds = 0.0
        self._command = command or {}
        self._served: Served | None = None
        self._inputs: TrainingInputs | None = None
        self._record: RunFile | None = None
        self._ending = (RunState.FINISHED, "")
        self.processor = ContinuousBatchProcessor(
            self._build, config.debug.check_when_idle, config.server.device_timeout
        )
        self._threads = BlasThreads()
        self.watch = MachineWatch(config, self.processor, None if config.rl_training.enabled else self._threads)
        self._lead: Lead | None = None
        if ranks is not None:
            self._lead = needed("ranks.running", "mlx.launch").Lead(ranks, self.processor.lose)
        parts = self._lead.parts if self._lead is not None else Parts()
        self.shared = SharedDevice(config, self.processor, base_paths(config), parts)
        self.bases = [BaseModel(at, self.shared) for at in self.shared.bases]

    def start(self) -> Served:
        """Loads the model, its adapters and checkpoints.

        Raises:
            ModelError, ConfigError: they cannot be loaded, or something else that is configured cannot be used.
        """
        check(self.config)
        checkpointing, training = self.config.checkpointing, self.config.rl_training.enabled
        self._inputs = TrainingInputs.of(self.config) if training else None
        for path in (*(base.at.path for base in self.bases[1:]), self.config.model.draft_model):
            if path is not None:
                find_model(path)  # which may download it, for longer than a request would wait
        self.shared.run = open_run(checkpointing.checkpoint_dir, checkpointing.resume, wanted=training)
        self._choose_threads()
        _log.info("loading %s, and measuring how fast this machine computes it", self.bases[0].name)
        started = time.monotonic()
        try:
            self.processor.start()
            self.load_seconds = time.monotonic() - started
            assert self._served is not None
            if (service := self._served.training) is not None:
                service.extras |= offered("install", service)
            if self.shared.run is not None and training:
                self._record = self._begin_record(self.shared.run, self._served)
        except BaseException:  # an interrupt too: the folder must not stay locked
            self.processor.stop()
            self._close_run()
            raise
        return self._served

    def _choose_threads(self) -> None:
        """A server follows what other programs leave, see `MachineWatch`. A run keeps the number that it began with,
        over restarts too: an update that is made again must be the same to the bit."""
        run = self.shared.run
        earlier = read_record(run.path) if run is not None and self.config.rl_training.enabled else None
        if earlier is not None and earlier.starts and (count := earlier.starts[-1].blas_threads):
            self._threads.use(count, "as this run began")
            return
        try:
            self._threads.adapt()
        except OSError as error:
            _log.debug("what other programs use is not known: %s", error)

    def _begin_record(self, run: Run, served: Served) -> RunFile:
        cards = {card.ref.name: card for card in served.adapters.cards() if card.live}
        lineage = {name: f"{card.ref} of {card.root}" if card.root else str(card.ref) for name, card in cards.items()}
        configuration = self.config.model_dump(mode="json")
        record = RunFile(run.path, run.id, configuration, self._command, lineage, self._threads.count)
        if record.changes:
            _log.info("changed since the run's last start: %s", ", ".join(record.changes))
        return record

    def ends(self, state: RunState, reason: str = "") -> None:
        """Says how the run has ended, for its record. Without a call, it has finished."""
        self._ending = (state, reason)

    @contextmanager
    def failures_recorded(self) -> Iterator[None]:
        """An error that leaves the block is in the run's record, and an interrupt too."""
        try:
            yield
        except Exception as error:  # whatever it is, it is recorded and raised again
            self.ends(RunState.FAILED, str(error) or type(error).__name__)
            raise
        except BaseException:  # Ctrl-C, or the end of the event loop: recorded and raised again
            self.ends(RunState.INTERRUPTED, "it was interrupted")
            raise

    def stop(self) -> None:
        """Ends the device thread and releases the run's folder to other processes."""
        self.processor.stop()
        if self._lead is not None:
            self._lead.stop()
        self._close_run()

    def _close_run(self) -> None:
        if self._record is not None:
            try:
                self._record.end(*self._ending)
            except StorageError as error:
                _log.error("%s", error)
            self._record = None
        if self.shared.run is not None:
            self.shared.run.close()
            self.shared.run = None

    def _build(self) -> EngineParts:
        parts, self._served = build(self.bases[0], self.shared, self._inputs)
        return parts


def build(base: BaseModel, shared: SharedDevice, inputs: TrainingInputs | None) -> tuple[EngineParts, Served]:
    """Builds the first base model, and training if it is on. On the device thread, which then owns the arrays."""
    config = shared.config
    limits = mlx_limits(config)
    set_limits(limits)
    built = base.build()
    training, work = _training(base, built, shared, inputs)
    others = tuple(other.name for other in shared.bases[1:])
    served = Served(
        base.card,
        base.tokenizer,
        device_name(),
        limits,
        base.adapters,
        shared.processor,
        training,
        shared.run,
        base.known,
        others,
    )
    parts = base.parts(built, work)
    mx.reset_peak_memory()
    return parts, served


def _training(
    base: BaseModel, built: Built, shared: SharedDevice, inputs: TrainingInputs | None
) -> tuple[TrainingService | None, TrainingWork | None]:
    """The service that trains, and its work on the device; nothing if training is off."""
    config, processor, manager = shared.config, shared.processor, built.manager
    stall_s = device_schedule(config, on_cpu()).max_decode_stall_s
    trainer = build_trainer(manager, built.bank, config, shared.budget, stall_s, shared.parts)
    if trainer is None:
        return None, None
    run = shared.run
    assert run is not None  # a server that trains has a run
    assert inputs is not None
    journal = Journal(JournalFile(run.path / JOURNAL, manager.fingerprint), config.checkpointing.journal_updates)
    extra = find("reward_models.service")
    reward_models = None if extra is None else extra.open_models(processor, trainer, manager, config)
    training = build_training(
        processor, trainer, base.adapters, base.known, base.tokenizer, config, journal, reward_models, inputs
    )
    return training, trainer
