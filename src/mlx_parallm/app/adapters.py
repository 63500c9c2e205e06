"""Builds what serves adapters: bank, store, library, and what is there from the start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.books import AdapterBooks
from mlx_parallm.adapters.checkpoints import CheckpointManager, LoadedCheckpoint
from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.adapters.library import AdapterLibrary, info_of_checkpoint, info_of_file
from mlx_parallm.adapters.runs import Run
from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.config import Config
from mlx_parallm.errors import ConfigError, InvalidRequestError, UnknownModelError
from mlx_parallm.model.adapted import adapter_layout, install_adapters
from mlx_parallm.model.fingerprint import fingerprint, model_files
from mlx_parallm.model.manager import SharedModelManager

_log = logging.getLogger(__name__)


def build_bank(manager: SharedModelManager, config: Config) -> AdapterBank:
    """An empty bank, and the model's linears reading it. On the device thread."""
    layout = adapter_layout(manager.model, manager.family)
    bank = AdapterBank(layout, config.adapters.max_loras, config.adapters.max_lora_rank, manager.kv_dtype)
    install_adapters(manager.model, bank)
    return bank


def build_store(
    bank: AdapterBank, manager: SharedModelManager, config: Config, run: Run | None, wake: Callable[[], None]
) -> tuple[AdapterStore, AdapterLibrary]:
    """The store and its library, with the restored checkpoints of `run` and the adapters of `adapter_dir` in its books.

    Raises:
        ConfigError: a folder cannot be used, or `adapters.serve` names nothing.
    """
    checkpoints = _checkpoints(bank.layout, manager, config, run) if run else None
    adapters = config.adapters
    roots = (*adapters.allowed_adapter_roots, *((adapters.adapter_dir,) if adapters.adapter_dir else ()))
    library = AdapterLibrary(bank.layout, bank.max_rank, adapters.adapter_dir, roots, checkpoints)
    books = AdapterBooks(adapters.default_adapter, library.find_checkpoint, library.first_version)
    if checkpoints:
        checkpoints.in_use = books.serves
        _restore(checkpoints, books)
    for name, file in library.discover():
        if books.live(name) is None:
            books.flip(books.add(name, info_of_file(file)).ref)
    _serve(books, adapters.serve)
    reader = ThreadPoolExecutor(1, thread_name_prefix="adapter-reader")
    return AdapterStore(bank, books, library.read_again, reader, adapters.max_cpu_loras, wake), library


def _checkpoints(layout: AdapterLayout, manager: SharedModelManager, config: Config, run: Run) -> CheckpointManager:
    base = fingerprint(model_files(manager.source) if manager.source.is_dir() else [manager.source])
    return CheckpointManager(
        run.path, layout, base, config.adapters.max_lora_rank, config.checkpointing.keep_n_checkpoints
    )


def _restore(checkpoints: CheckpointManager, books: AdapterBooks) -> None:
    """Makes each adapter's name mean its latest checkpoint; one that cannot be used is left out with a warning."""
    for name in sorted({card.adapter.name for card in checkpoints.cards()}):
        try:
            checkpoints.hot_swap(name, "latest", publish=partial(_publish, books))
        except InvalidRequestError as error:
            _log.warning("the latest checkpoint of %s is not restored: %s", name, error)


def _publish(books: AdapterBooks, checkpoint: LoadedCheckpoint) -> None:
    version = books.know(checkpoint.card.adapter, info_of_checkpoint(checkpoint.card, checkpoint.digest))
    books.flip(version.ref)


def _serve(books: AdapterBooks, selector: str | None) -> None:
    if selector is None:
        return
    try:
        books.set_route({selector: 1.0})
    except UnknownModelError as error:
        raise ConfigError(
            f"adapters.serve: no adapter or checkpoint is called {selector!r}; give --serve-adapter a name of "
            "--adapter-dir or --checkpoint-dir, or leave it out"
        ) from error
