"""Checkpoints survive kills, bad disks and concurrent savers."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import saves
from saves import (
    NAME,
    assert_holds,
    hidden,
    manager,
    names,
    one_checkpoint,
    ref,
    template,
    third_save,
    weights,
    write_optimizer,
)

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.errors import (
    StorageError,
)

pytestmark = pytest.mark.ci


def test_a_kill_before_any_write_leaves_a_good_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old or, once renamed, new: it verifies, the next save succeeds, and nothing hidden stays."""
    caplog.set_level(logging.ERROR)
    template(tmp_path / "template")
    results = tmp_path / "results"
    driver = saves.__file__
    environment = {**os.environ, "MLX_PARALLM_BLAS": "none", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, driver, str(tmp_path / "template"), str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    latest = [_check_after_kill(folder) for folder in sorted(results.iterdir(), key=lambda path: int(path.name))]
    assert len(latest) > 25  # every write of the save, and of pruning, was reached
    assert latest == sorted(latest)
    assert (latest[0], latest[-1]) == (2, 3)


def _check_after_kill(folder: Path) -> int:
    """Returns what `latest` means: the seed of its weights."""
    restored = manager(folder, keep=2)
    assert hidden(folder) == hidden(folder / NAME) == []
    assert [card.step for card in restored.cards()] in ([1, 2], [1, 2, 3], [2, 3])
    assert names(restored.cards()) == sorted(entry.name for entry in (folder / NAME).glob("checkpoint-*"))
    for card in restored.cards():
        assert_holds(restored.load_checkpoint(NAME, card.name), seed=card.step)
    assert restored.load_checkpoint(NAME, "best").card.step in (2, 3)
    latest = restored.load_checkpoint(NAME).card.step
    saved = third_save(folder)
    assert saved.tags == ("best", "latest")
    assert manager(folder, keep=2).load_checkpoint(NAME).card == saved
    assert len(manager(folder).cards()) == 2
    return latest


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut, unlike a kill, loses what was not fsynced: files and their folder first, then the rename."""
    template(tmp_path)
    synced: set[int] = set()
    renamed: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)

    def watched(real: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def rename(source: Path, target: Path) -> None:
            assert {path.stat().st_ino for path in (source, *source.glob("*"))} <= synced
            synced.discard(target.parent.stat().st_ino)
            real(source, target)
            renamed.append(target.name)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(os, "replace", watched(os.replace))
    manager(tmp_path).save_checkpoint(ref(3), weights(3), tags=["best"], extra=write_optimizer)
    assert renamed == ["checkpoint-3", "tags.json", "latest"]
    assert (tmp_path / NAME).stat().st_ino in synced


@pytest.mark.parametrize("call", ["fsync", "rename", "replace", "mkdir"])
def test_a_full_disk_costs_only_the_save_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Each call to the filesystem fails in turn, until a save gets through; the manager lives on all the time."""
    for attempt in range(1, 100):
        folder = tmp_path / str(attempt)
        template(folder)
        checkpoints = manager(folder, keep=2)
        with monkeypatch.context() as patch:
            _fail(patch, call, attempt)
            reason = _stopped(checkpoints)
        assert not [name for name in hidden(folder / NAME) if not name.startswith(".trash-")]
        good = checkpoints.load_checkpoint(NAME)
        assert_holds(good, seed=good.card.step)
        assert good.card.step in ((2, 3) if reason else (3,))
        assert "No space left on device" in reason or not reason
        assert checkpoints.save_checkpoint(ref(3), weights(3), step=3, tags=["best"]).tags == ("best", "latest")
        assert hidden(folder / NAME) == []
        assert names(manager(folder).cards()) == names(checkpoints.cards())
        assert_holds(manager(folder).load_checkpoint(NAME, "best"), seed=3)
        if not reason:
            break
    assert attempt > 1


def _stopped(checkpoints: CheckpointStore) -> str:
    """What the third save says of the disk; "" where it succeeds."""
    try:
        checkpoints.save_checkpoint(ref(3), weights(3), tags=["best"])
    except StorageError as error:
        return str(error)
    return ""


def _fail(patch: pytest.MonkeyPatch, call: str, attempt: int) -> None:
    """Makes the `attempt`-th call of `os.<call>` fail."""
    real: Callable[..., object] = getattr(os, call)
    calls = 0

    def failing(*arguments: object, **keywords: object) -> object:
        nonlocal calls
        calls += 1
        if calls == attempt:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **keywords)

    patch.setattr(os, call, failing)


def test_readers_do_not_wait_for_a_save(tmp_path: Path) -> None:
    """Asked from within a save, which holds the lock: a reader that took it would wait for ever."""
    checkpoints = one_checkpoint(tmp_path)
    seen: list[object] = []

    def extra(_folder: Path) -> None:
        found = checkpoints.find(NAME, "latest")
        seen.extend([found and found.name, len(checkpoints.cards()), checkpoints.newest_version(NAME)])

    checkpoints.save_checkpoint(ref(2), weights(2), extra=extra)
    assert seen == ["checkpoint-1", 1, 1]


def test_threads_that_save_at_once_each_get_a_step(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=100)
    cards: list[CheckpointCard] = []
    start = threading.Barrier(2)

    def save(first: int) -> None:
        start.wait()
        for version in range(first, first + 8):
            cards.append(checkpoints.save_checkpoint(ref(version), weights(version), tags=[f"v{version}"]))
            checkpoints.load_checkpoint(NAME)

    threads = [threading.Thread(target=save, args=(first,)) for first in (1, 101)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(card.step for card in cards) == list(range(1, 17))
    restored = manager(tmp_path, keep=100)
    assert restored.cards() == checkpoints.cards()
    for card in cards:
        loaded = restored.load_checkpoint(NAME, f"v{card.adapter.version}")
        assert (loaded.card.step, loaded.card.adapter) == (card.step, card.adapter)
        assert_holds(loaded, seed=card.adapter.version)
