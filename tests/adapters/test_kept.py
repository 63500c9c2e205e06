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
from mlx_parallm.errors import ConfigError, ConflictError, StorageError


def ref(version: int, name: str = "tone") -> AdapterRef:
    return AdapterRef(name, version)


def test_numbers_and_what_is_live_are_read_again(tmp_path: Path) -> None:
    kept = KeptVersions(tmp_path)
    kept.number(ref(1), "a")
    kept.number(ref(7), "b")
    kept.set_live("tone", [1, 7], 7, {1, 7})
    again = KeptVersions(tmp_path)
    assert [name for name, _ in again] == ["tone"]
    assert (again.number_of("tone", "a"), again.number_of("tone", "b"), again.number_of("tone", "c")) == (1, 7, None)
    assert (again.of("tone").last, again.of("tone").live, again.of("tone").found) == (7, (1, 7), 7)
    again.number(ref(8), "a")
    assert KeptVersions(tmp_path).number_of("tone", "a") == 8, "the newest one"
    again.forget("tone")
    assert again.of("tone").last == 0


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
    kept.set_live("tone", [2, 3], 3, {2, 3})
    assert sorted(path.name for path in (tmp_path / "tone").iterdir()) == [
        "checkpoint-1",
        "version-2",
        "version-3",
        VERSIONS_FILE,
    ]


def test_without_a_folder_nothing_is_kept() -> None:
    kept = KeptVersions()
    kept.number(ref(1), "a")
    kept.set_live("tone", [1], 1, {1})
    assert (bool(kept), list(kept), kept.copy_of(ref(1)), kept.number_of("tone", "a")) == (False, [], None, None)


def test_names_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    kept = KeptVersions(tmp_path)
    kept.number(ref(1), "a")
    with pytest.raises(ConflictError, match="Tone and tone would share a folder"):
        kept.number(ref(1, "Tone"), "b")


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
