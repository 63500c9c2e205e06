"""The extras: what few use. Nothing but this page imports them, and the rest works without each of them.

    install_extras ─▶ competition, people, …   which add to the hooks of training
    install_served_extras ─▶ averages, lessons, Tinker, Atropos, …   which requests ask for by name

An extra that is not there is left out. One that a setting asks for must be there: a ConfigError says so.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm.adapters.cards import KeptPart
from mlx_parallm.adapters.runs import Run
from mlx_parallm.config import Config, TrackerName
from mlx_parallm.config.training import TeacherConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import CLUSTER, is_extra
from mlx_parallm.rl.environments import Environment, Task
from mlx_parallm.rl.environments.names import LOADERS
from mlx_parallm.rl.scoring.catalogue import no_reward_model
from mlx_parallm.rl.tracking.tracking import Tracker

if TYPE_CHECKING:
    from mlx_parallm.app.build import Served
    from mlx_parallm.app.training import TrainingRuntime
    from mlx_parallm.app.training_run import TrainingRun
    from mlx_parallm.engine.thread import ContinuousBatchProcessor
    from mlx_parallm.extras.cluster.node import Node
    from mlx_parallm.extras.curriculum import Curriculum
    from mlx_parallm.extras.ranks.joining import Ranks
    from mlx_parallm.extras.ranks.running import Lead
    from mlx_parallm.extras.reward_models.service import RewardModels
    from mlx_parallm.model.manager import SharedModelManager
    from mlx_parallm.rl.rollouts.engine import InferenceEngine
    from mlx_parallm.rl.teachers import Score
    from mlx_parallm.server.backend import Backend
    from mlx_parallm.server.services import Services
    from mlx_parallm.train.trainer import GRPOTrainer

_log = logging.getLogger(__name__)

Install = Callable[[Config, "Served", "TrainingRuntime"], Any]
"""Puts an extra in, and returns what requests ask for; None: they ask for nothing."""


def install_extras(config: Config, served: Served, training: TrainingRuntime) -> None:
    """Puts in the extras of every process that trains."""
    _install((_competition, _people, _lesson_groups, _reward_models), config, served, training)


def install_served_extras(config: Config, served: Served, training: TrainingRuntime) -> None:
    """Puts in the extras that only a server has. Training has not started."""
    _install((_averages, _lessons, _tinker, _atropos, _atropos_batches), config, served, training)


def _install(extras: Iterable[Install], config: Config, served: Served, training: TrainingRuntime) -> None:
    for install in extras:
        with _if_there():
            extra = install(config, served, training)
            if extra is not None:
                training.service.extras[install.__name__.strip("_")] = extra


@contextmanager
def _if_there() -> Iterator[None]:
    """Leaves the rest of the block out if an extra is not there, and warns of it: a package that was installed whole
    has them all."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_extra(error):
            raise
        _log.warning("an extra is left out, because %s is not there", error.name)


# ---- of every process that trains ----------------------------------------------------------------


def _competition(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.extras.competition.service import install

    return install(training.service)


def _people(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.extras.people.service import install

    return install(training.service)


def _lesson_groups(config: Config, served: Served, training: TrainingRuntime) -> None:
    from mlx_parallm.extras.lessons.record import install

    install(training.service)


def _reward_models(config: Config, served: Served, training: TrainingRuntime) -> Any:
    if training.reward_models is None:
        return None
    from mlx_parallm.extras.reward_models.trainer import RewardModelTrainer

    return RewardModelTrainer(training.reward_models, training.service.parts.journal, config.model)


# ---- of a server ---------------------------------------------------------------------------------


def _averages(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.extras.averages.service import Averages

    return Averages(training.service, training.known.registry, training.known.library.max_rank)


def _lessons(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.extras.lessons.service import Lessons

    lessons = Lessons(config, served, training)
    training.on_end.append(lessons.close)
    return lessons


def _tinker(config: Config, served: Served, training: TrainingRuntime) -> Any:
    from mlx_parallm.extras.tinker.server import TinkerServer
    from mlx_parallm.extras.tinker.service import TinkerService

    settings, parts, known = config.rl_training.tinker, training.service.parts, training.known
    policies = TinkerService(
        training.learner,
        served.adapters,
        parts.checkpoints,
        known.registry,
        known.library.layout,
        known.library.max_rank,
        settings.max_models,
    )
    return TinkerServer(policies, served.card, settings)


def _atropos(config: Config, served: Served, training: TrainingRuntime) -> Any:
    if not config.server.atropos_api:
        return None
    from mlx_parallm.extras.atropos.groups import AtroposGroups
    from mlx_parallm.extras.atropos.registration import registration
    from mlx_parallm.extras.atropos.route import AtroposParts

    groups = AtroposGroups(training.service)
    return AtroposParts.of(registration(config, served, step=0), training.service, groups, served.card)


def _atropos_batches(config: Config, served: Served, training: TrainingRuntime) -> None:
    if config.rl_training.atropos_url is None:
        return
    from mlx_parallm.extras.atropos.registration import Batches

    batches = Batches(config, served, training.service)
    training.on_start.append(batches.start)
    training.on_end.append(batches.close)


# ---- one model over several processes ---------------------------------------------------------------


def joined(config: Config) -> Ranks | None:
    """The processes that `mlx.launch` has started, among which the model is split; None: there is this one only.

    Raises:
        ConfigError: the configuration asks for what a split model cannot do.
    """
    with _if_there():
        from mlx_parallm.extras.ranks.joining import join
        from mlx_parallm.extras.ranks.running import check_splittable

        ranks = join()
        if ranks is not None:
            check_splittable(config)
        return ranks
    return None


def leading(ranks: Ranks, lose: Callable[[str], None]) -> Lead:
    """Rank 0 of several; see `Lead`."""
    from mlx_parallm.extras.ranks.running import Lead

    return Lead(ranks, lose)


def follow(config: Config, ranks: Ranks) -> int:
    """Computes with rank 0 until it ends; see `extras.ranks.running.follow`."""
    from mlx_parallm.extras.ranks.running import follow

    return follow(config, ranks)


# ---- a cluster -------------------------------------------------------------------------------------


def config_in_cluster(config: Config, trains: bool = False) -> Config:
    """The configuration with which a process loads its model if it is a node of a cluster, as its trainer if it
    `trains`; else `config` itself.

    Raises:
        ConfigError: NATS is not installed, or the process cannot take part; see `prepare` and `prepare_trainer`.
    """
    if not config.cluster.wanted:
        return config
    if not CLUSTER.installed:
        raise ConfigError(f"cluster: {CLUSTER.missing}")
    with _needed_by("cluster"):
        from mlx_parallm.extras.cluster.running.serving import prepare, prepare_trainer
    return prepare_trainer(config) if trains else prepare(config)


@asynccontextmanager
async def node_of_cluster(config: Config, served: Served) -> AsyncIterator[Node | None]:
    """This server as a node of a cluster, until the block ends; None if it is not a node."""
    if not config.cluster.wanted:
        yield None
        return
    from mlx_parallm.extras.cluster.running.serving import joined

    async with joined(config, served) as node:
        yield node


def backend_of_node(backend: Backend, node: Node, default_adapter: str) -> Backend:
    """The backend of a server that is a node of a cluster; see `join`."""
    from mlx_parallm.extras.cluster.http.parts import join
    from mlx_parallm.extras.cluster.running.collection import ClusterCollection

    return join(backend, node, ClusterCollection(node, default_adapter))


def announce_node(node: Node, config: Config, services: Services, port: int) -> None:
    """Tells the other nodes that this one serves now, on `port`."""
    from mlx_parallm.extras.cluster.running.serving import begin_serving

    begin_serving(node, config, services, port)


def cluster_run(*parts: Any) -> TrainingRun:
    """The run of `mlx_parallm_train` on what the clients of a cluster send."""
    from mlx_parallm.extras.cluster.running.run import ClusterRun

    return ClusterRun(*parts)


def run_in_cluster(config: Config, steps: TrainingRun) -> Coroutine[Any, Any, None]:
    """All steps of a run that is the trainer of a cluster."""
    from mlx_parallm.extras.cluster.running.run import run_in_cluster

    return run_in_cluster(config, steps)


# ---- of the process, before training is there ------------------------------------------------------


def reward_models_of(
    processor: ContinuousBatchProcessor, trainer: GRPOTrainer, manager: SharedModelManager, config: Config
) -> RewardModels | None:
    """The reward models of the adapter folder, which the trainer scores with and trains."""
    with _if_there():
        from mlx_parallm.extras.reward_models.folder import RewardModelFolder
        from mlx_parallm.extras.reward_models.learning import RewardModelDevice
        from mlx_parallm.extras.reward_models.service import RewardModels

        folder = RewardModelFolder(config.adapters.adapter_dir, manager.fingerprint)
        return RewardModels(RewardModelDevice(processor, trainer), folder, manager.tokenizer)
    return None


def reward_model_check(config: Config) -> Callable[[str], None]:
    """Looks for a reward model by its name, before the model is loaded."""
    with _if_there():
        from mlx_parallm.extras.reward_models.folder import RewardModelFolder

        return RewardModelFolder(config.adapters.adapter_dir).check
    return no_reward_model


def is_reward_model(folder: Path) -> bool:
    """Whether a folder of adapter files is that of a reward model."""
    with _if_there():
        from mlx_parallm.extras.reward_models import folder as reward_models

        return reward_models.is_reward_model(folder)
    return False


def kept_of(run: Path, adapter: str) -> Iterator[KeptPart]:
    """What extras keep of an adapter in the folder of a run. Raises OSError."""
    with _if_there():
        from mlx_parallm.extras.lessons.record import FILE, read_lesson

        lesson = read_lesson(run)
        yield KeptPart("lesson", str(run / FILE), int(lesson is not None and lesson.adapter == adapter))


def forget_kept(run: Path, adapter: str) -> None:
    """Removes what extras keep of an adapter. Raises OSError."""
    with _if_there():
        from mlx_parallm.extras.lessons.record import forget_lesson

        forget_lesson(run, adapter)


# ---- for a setting ---------------------------------------------------------------------------------


@contextmanager
def _needed_by(setting: str) -> Iterator[None]:
    """Raises ConfigError: the extra that the block imports is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_extra(error):
            raise
        raise ConfigError(f"{setting}: this needs {error.name}, which is not there") from error


def check_trackers(wanted: Sequence[TrackerName]) -> None:
    """Raises ConfigError: the package of a tracker is not installed."""
    if wanted:
        with _needed_by("rl_training.trackers"):
            from mlx_parallm.extras.trackers import check_installed
        check_installed(wanted)


def trackers_of(config: Config, run: Run) -> Mapping[str, Callable[[], Tracker]]:
    """Functions that open the trackers which the configuration names, by name."""
    wanted = config.rl_training.trackers
    if not wanted:
        return {}
    with _needed_by("rl_training.trackers"):
        from mlx_parallm.extras.trackers import TrackedRun, trackers_of
    shown = config.model_dump(mode="json", include={"model", "rl_training"})
    return trackers_of(TrackedRun(run.path, run.id, run.path.name, config.adapters.default_adapter, shown), wanted)


def curriculum_of(
    config: Config, tasks: Iterator[Task], taken: int, state: Mapping[str, float] | None, lag: int
) -> Curriculum:
    """The tasks of an environment in the order of a curriculum; see `Curriculum`."""
    with _needed_by("rl_training.curriculum.enabled"):
        from mlx_parallm.extras.curriculum import Curriculum
    return Curriculum(tasks, config.rl_training.curriculum, config.rl_training.seed, taken, state, lag)


def outside_engine(config: Config, served: Served, cluster: InferenceEngine | None) -> InferenceEngine | None:
    """The outside engine of the configuration, together with the engine of a cluster. None: there is neither."""
    if cluster is None and not config.inference.engine.outside:
        return None
    with _needed_by("inference.engine"):
        from mlx_parallm.extras.engines.building import outside_engine
    return outside_engine(config, served, cluster)


def teacher_score(config: TeacherConfig) -> tuple[Score, Callable[[], Awaitable[None]]]:
    """How the teacher on another server scores, and what ends its connection."""
    with _needed_by("rl_training.teacher.url"):
        from mlx_parallm.extras.engines.http import EngineServer
        from mlx_parallm.extras.engines.teacher import server_score
    assert config.url is not None
    key = config.api_key.get_secret_value() if config.api_key else ""
    server = EngineServer("teacher's", config.url, key, 2 * config.timeout_s)  # `Teacher` has the shorter limit
    return server_score(server, config.model or ""), server.close


def atropos_run(*parts: Any) -> TrainingRun:
    """The run of `mlx_parallm_train` on Atropos' groups."""
    with _needed_by("rl_training.atropos_url"):
        from mlx_parallm.extras.atropos.run import AtroposRun
    return AtroposRun(*parts)


def _verifiers(name: str) -> Environment:
    with _needed_by("environment"):
        from mlx_parallm.extras import verifiers
    return verifiers.load(name)


LOADERS["verifiers:"] = _verifiers
