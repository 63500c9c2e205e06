"""What is kept of versions that were loaded from folders, and what happens when it cannot be."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_parallm import atomic
from mlx_parallm.adapters.runs import VERSIONS_FILE, KeptVersions
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConfigError, StorageError


def ref(version: int, name: str = "tone") -> AdapterRef:
    return AdapterRef(name, version)


def test_numbers_that_are_given_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptVersions(tmp_path)
    write, first = atomic.replace_file, threading.Event()

    def slow(path: Path, content: bytes) -> None:
        if not first.is_set():
            first.set()
            time.sleep(0.2)  # the other one comes meanwhile
        write(path, content)

    monkeypatch.setattr(atomic, "replace_file", slow)
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(kept.number, ref(1), "a")
        assert first.wait(10)
        two = threads.submit(kept.number, ref(2), "b")
        one.result()
        two.result()
    assert KeptVersions(tmp_path).of("tone").numbers == {"a": 1, "b": 2}


def test_an_adapter_with_many_contents_keeps_the_newest_and_never_repeats_a_number(tmp_path: Path) -> None:
    kept = KeptVersions(tmp_path)
    for number in range(1, 151):
        kept.number(ref(number), str(number))
    again = KeptVersions(tmp_path).of("tone")
    assert (len(again.numbers), again.last, "50" in again.numbers, "51" in again.numbers) == (100, 150, False, True)


def test_copies_of_versions_that_nobody_knows_are_removed(tmp_path: Path) -> None:
    kept = KeptVersions(tmp_path)
    kept.number(ref(3), "c")
    for number in (1, 2, 3):
        copy = kept.copy_of(ref(number))
        assert copy is not None
        copy.mkdir()
    (tmp_path / "tone" / "checkpoint-1").mkdir()
    kept.set_live("tone", [2, 3], 3, "", {2, 3})
    assert sorted(path.name for path in (tmp_path / "tone").iterdir()) == [
        "checkpoint-1",
        "version-2",
        "version-3",
        VERSIONS_FILE,
    ]


def test_a_copy_that_cannot_be_removed_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptVersions(tmp_path)
    copy = kept.copy_of(ref(1))
    assert copy is not None
    copy.mkdir(parents=True)

    def fails(folder: Path) -> Path:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(atomic, "hide", fails)
    kept.set_live("tone", [2], 2, "", {2})
    assert KeptVersions(tmp_path).of("tone").live == (2,)
    assert copy.exists()


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, mode: int = 0) -> None:
        raise OSError(28, "No space left on device")

    kept = KeptVersions(tmp_path)
    kept.number(ref(1), "a")
    monkeypatch.setattr(atomic, "replace_file", full)
    with pytest.raises(StorageError, match="No space left on device; make room"):
        kept.number(ref(2), "b")
    assert kept.of("tone").last == 1 == KeptVersions(tmp_path).of("tone").last


@pytest.mark.parametrize("content", ["", "{", '{"numbers": {"a": "one"}}', '{"other": 1}'])
def test_a_damaged_file_stops_the_start_and_says_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / "tone").mkdir()
    (tmp_path / "tone" / VERSIONS_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"versions\.json cannot be read .*: restore it from a backup, or remove it"):
        KeptVersions(tmp_path)
