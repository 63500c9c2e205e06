"""Damaged checkpoints are found and named, never loaded, and never cost the ones beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from saves import (
    BASE,
    NAME,
    assert_holds,
    manager,
    names,
    one_checkpoint,
    ref,
    weights,
)

from mlx_parallm.errors import (
    AdapterFileError,
    ConflictError,
)

FILES = ("adapters.safetensors", "adapter_config.json", "manifest.json", "optimizer.bin")


def flip(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    checkpoints = one_checkpoint(tmp_path)
    path = tmp_path / NAME / "checkpoint-1" / name
    good = path.read_bytes()
    for bit in range(0, len(good) * 8, 61):
        path.write_bytes(flip(good, bit))
        with pytest.raises(AdapterFileError, match=f"math/checkpoint-1/{name} is damaged"):
            checkpoints.load_checkpoint(NAME)
    path.write_bytes(good)
    assert_holds(checkpoints.load_checkpoint(NAME), seed=1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "emptied", "longer", "gone"])
def test_cut_and_missing_files_are_found(tmp_path: Path, name: str, how: str) -> None:
    checkpoints = one_checkpoint(tmp_path)
    path = tmp_path / NAME / "checkpoint-1" / name
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        path.write_bytes({"cut": data[:-1], "emptied": b"", "longer": data + b"\0"}[how])
    with pytest.raises(AdapterFileError, match=f"{name} is damaged or missing"):
        checkpoints.load_checkpoint(NAME)


def test_a_manifest_with_any_flipped_bit_makes_no_checkpoint(tmp_path: Path) -> None:
    one_checkpoint(tmp_path)
    path = tmp_path / NAME / "checkpoint-1" / "manifest.json"
    good = path.read_bytes()
    for bit in range(0, len(good) * 8, 37):
        path.write_bytes(flip(good, bit))
        assert manager(tmp_path).cards() == ()
    assert path.exists()


def test_a_copy_under_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    one_checkpoint(tmp_path)
    shutil.copytree(tmp_path / NAME / "checkpoint-1", tmp_path / NAME / "checkpoint-2")
    shutil.copytree(tmp_path / NAME, tmp_path / "law")
    assert [(card.adapter.name, card.name) for card in manager(tmp_path).cards()] == [(NAME, "checkpoint-1")]


def test_another_base_model_is_named(tmp_path: Path) -> None:
    one_checkpoint(tmp_path)
    other = manager(tmp_path, base="f" * 32)
    with pytest.raises(AdapterFileError, match=f"{BASE}.*{'f' * 32}"):
        other.load_checkpoint(NAME)
    other.save_checkpoint(ref(2), weights(2))
    assert_holds(other.load_checkpoint(NAME), seed=2)


@pytest.mark.parametrize("content", [None, b"", b"checkpoint-1", b"checkpoint-9\n", b"\xff\n", b"../checkpoint-1\n"])
def test_an_unusable_latest_falls_back_to_the_highest_step(tmp_path: Path, content: bytes | None) -> None:
    for seed, step in ((1, 1), (2, 12), (3, 3)):
        manager(tmp_path).save_checkpoint(ref(seed), weights(seed), step)
    latest = tmp_path / NAME / "latest"
    latest.unlink() if content is None else latest.write_bytes(content)
    assert_holds(manager(tmp_path).load_checkpoint(NAME), seed=2)


def test_a_damaged_latest_falls_back_to_the_highest_step_that_verifies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (1, 2, 3):
        manager(tmp_path).save_checkpoint(ref(seed), weights(seed))
    for name in ("checkpoint-3", "checkpoint-2"):
        (tmp_path / NAME / name / "adapters.safetensors").write_bytes(b"")
    checkpoints = manager(tmp_path)
    assert_holds(checkpoints.load_checkpoint(NAME), seed=1)
    assert "checkpoint-3/adapters.safetensors is damaged" in caplog.text
    assert checkpoints.save_checkpoint(ref(4), weights(4)).name == "checkpoint-4"


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one_checkpoint(tmp_path)
    for name in ("checkpoint-2", "checkpoint-03", "notes"):
        (tmp_path / NAME / name).mkdir()
        (tmp_path / NAME / name / "mine.txt").write_text("keep")
    (tmp_path / "lost+found").mkdir()
    checkpoints = manager(tmp_path, keep=1)
    assert names(checkpoints.cards()) == ["checkpoint-1"]
    assert "checkpoint-2 is skipped" in caplog.text
    with pytest.raises(ConflictError):
        checkpoints.save_checkpoint(ref(2), weights(2), step=2)
    assert checkpoints.save_checkpoint(ref(2), weights(2)).step == 3
    assert len(list((tmp_path / NAME).glob("*/mine.txt"))) == 3


@pytest.mark.parametrize("content", [b"{", b'["checkpoint-1"]', b'{"best": 1}', b"\xff"])
def test_damaged_tags_cost_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    for seed in (1, 2, 3):
        manager(tmp_path).save_checkpoint(ref(seed), weights(seed), tags=["best"] * (seed == 1))
    (tmp_path / NAME / "tags.json").write_bytes(content)
    manager(tmp_path, keep=1).save_checkpoint(ref(4), weights(4), tags=["good"])
    after = manager(tmp_path, keep=1)
    after.save_checkpoint(ref(5), weights(5))
    assert names(after.cards()) == [f"checkpoint-{step}" for step in (1, 2, 3, 4, 5)]


def test_tags_that_lead_nowhere_are_dropped(tmp_path: Path) -> None:
    one_checkpoint(tmp_path)
    (tmp_path / NAME / "tags.json").write_text('{"best": "checkpoint-8", "a/b": "checkpoint-1", "ok": "checkpoint-1"}')
    assert manager(tmp_path).cards()[0].tags == ("latest", "ok")
