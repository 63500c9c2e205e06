"""Finds the adapters of a base model: the versions of a run's checkpoints and of an adapter folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.files import AdapterFile
from mlx_parallm.adapters.registry import AdapterRegistry
from mlx_parallm.adapters.residency import AdapterStore
from mlx_parallm.adapters.runs import KeptVersions, LoadedVersions, Run
from mlx_parallm.adapters.service import AdapterLibrary
from mlx_parallm.adapters.weights import Version
from mlx_parallm.config import Config
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConfigError, ConflictError, InvalidRequestError, StorageError, UnknownModelError
from mlx_parallm.extras_table import needed
from mlx_parallm.model.manager import SharedModelManager

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownAdapters:
    """The adapters of one base model, without their weights on the device. `reader`: the thread that reads files."""

    registry: AdapterRegistry
    library: AdapterLibrary
    reader: Executor

    def store(self, bank: AdapterBank, copies: int, wake: Callable[[], None]) -> AdapterStore:
        """A store that brings them into `bank`."""
        return AdapterStore(bank, self.registry, self.library.read_again, self.reader, copies, wake)


def find_adapters(
    manager: SharedModelManager,
    config: Config,
    run: Run | None = None,
    model_names: Sequence[str] = (),
    belongs: Callable[[Path], bool] = lambda folder: True,
    first: bool = True,
) -> KnownAdapters:
    """The checkpoints of `run`, which are the first base model's, and the adapters of `adapter_dir`.

    Args:
        model_names: see `AdapterRegistry`.
        belongs: whether an adapter of `adapter_dir` is for this base model.
        first: it is the first base model, which answers requests that name none.

    Raises:
        ConfigError: a folder cannot be used, or `adapters.serve` names no adapter or checkpoint.
    """
    adapters = config.adapters
    keep = config.checkpointing.keep_n_checkpoints
    layout, rank = manager.adapter_layout, adapters.max_lora_rank
    checkpoints = CheckpointStore(run.path, layout, manager.fingerprint, rank, keep) if run and first else None
    kept = KeptVersions(run.path if run and not run.own else None)
    others = (adapters.adapter_dir, adapters.serve_folder, adapters.init_from)
    downloads = (needed("hub", "--allowed-hub-adapters").FOLDER,) if adapters.allowed_hub_adapters else ()
    roots = (*adapters.allowed_adapter_roots, *(folder for folder in others if folder), *downloads)
    library = AdapterLibrary(layout, rank, adapters.adapter_dir, roots, checkpoints, kept, belongs)
    registry = AdapterRegistry(
        adapters.default_adapter,
        library.find_checkpoint,
        library.first_version,
        kept.number_of,
        model_names,
        default_takes_over=config.rl_training.enabled and adapters.serve is None,
    )
    if checkpoints:
        checkpoints.in_use = registry.needs_files
        _restore(checkpoints, registry)
    if first and adapters.init_from is not None and registry.live(adapters.default_adapter) is None:
        try:
            begun_from = library.read_anywhere(adapters.init_from)
        except InvalidRequestError as error:
            raise ConfigError(f"adapters.init_from: {adapters.init_from} cannot be used: {error}") from error
        _add(library, registry, adapters.default_adapter, begun_from)
    for name, file in library.discover():
        if registry.live(name) is None:
            _add(library, registry, name, file)
    for name, before in kept:
        _make_live_again(library, registry, name, before)
    if first and adapters.serve is not None:
        _route(registry, adapters.serve)
    return KnownAdapters(registry, library, ThreadPoolExecutor(1, thread_name_prefix="adapter-reader"))


def _restore(checkpoints: CheckpointStore, registry: AdapterRegistry) -> None:
    """Makes each adapter's latest checkpoint live. One that cannot be used is left out with a warning."""
    for name in sorted({card.adapter.name for card in checkpoints.cards()}):
        try:
            checkpoint = checkpoints.load_checkpoint(name)
        except InvalidRequestError as error:
            _log.warning("the latest checkpoint of %s is not restored: %s", name, error)
        else:
            registry.flip(registry.restore(checkpoint.card.adapter, checkpoint.info).ref)


def _add(library: AdapterLibrary, registry: AdapterRegistry, name: str, file: AdapterFile) -> None:
    """Makes the adapter of a folder live, under the number that its content has."""
    before, version = library.kept.of(name), registry.add(name, file.info)
    try:
        library.kept.number(version.ref, file.info.digest)
    except (StorageError, ConflictError) as error:
        _log.warning("another start may give the number of %s to other weights: %s", version.ref, error)
    if before.last and file.info.digest not in before.numbers:
        _log.info("%s: its folder has new files, which are %s", name, version.ref)
    registry.flip(version.ref)


def _make_live_again(library: AdapterLibrary, registry: AdapterRegistry, name: str, before: LoadedVersions) -> None:
    """Makes the version live that was live when the server ended, unless there is something newer to serve by now."""
    found = registry.live(name)
    number = None if found is None else found.ref.version
    if not before.live or number not in (before.found, before.live[-1]):
        return
    if number != before.live[-1] and library.newest_save(name) != before.saved:  # training went on from it
        return
    versions: list[Version] = []
    for ref in (AdapterRef(name, number) for number in before.live):
        try:
            versions.append(registry.known(ref) or registry.restore(ref, library.info_of(ref)))
        except InvalidRequestError as error:
            _log.warning("%s was live before the restart, and cannot be served: %s", ref, error)
    if versions and versions[-1].ref.version == before.live[-1]:
        registry.set_history(versions)
        if found is not None and versions[-1] is not found:
            place = "latest checkpoint" if found.info.checkpoint else "folder"
            _log.info("%s: live %s, as before the restart; its %s has %s", name, versions[-1].ref, place, found.ref)


def _route(registry: AdapterRegistry, selector: str) -> None:
    """Sends requests that name no adapter to `selector`."""
    try:
        registry.set_route({selector: 1.0})
    except UnknownModelError as error:
        raise no_such_adapter(selector) from error


def no_such_adapter(selector: str) -> ConfigError:
    """The error for `adapters.serve`."""
    return ConfigError(
        f"adapters.serve: no adapter or checkpoint is called {selector!r}; give --serve-adapter a name of "
        "--adapter-dir or --checkpoint-dir, or leave it out"
    )
