"""Folders of reward models: written whole, read with their checksums, found by name, and told from adapters."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from adapter_folders import DOWN0, HIDDEN, LAYOUT, Q0, random_weights
from safetensors.numpy import load_file, save_file

from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.adapters.service import AdapterLibrary
from mlx_parallm.errors import AdapterFileError, ConflictError, InvalidRequestError
from mlx_parallm.extras.reward_models.folder import RewardModelFolder, RewardModelWeights

FINGERPRINT, WEIGHTS = "f" * 32, "adapter_model.safetensors"


def weights(seed: int = 0) -> RewardModelWeights:
    head = np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)
    return RewardModelWeights(random_weights({Q0: 4, DOWN0: 2}, {Q0: 2.0, DOWN0: 0.5}, seed), head)


@pytest.fixture
def saved(tmp_path: Path) -> RewardModelFolder:
    folder = RewardModelFolder(tmp_path, FINGERPRINT)
    folder.save("helpful", weights(), LAYOUT, {"held_out_agreement": 0.9})
    return folder


def change_config(tmp_path: Path, **changes: object) -> None:
    """Changes the config of a reward model that has no manifest, as if another program had written it."""
    (tmp_path / "helpful" / "manifest.json").unlink(missing_ok=True)
    path = tmp_path / "helpful" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_written_is_read(saved: RewardModelFolder, tmp_path: Path) -> None:
    want, got = weights(), saved.load("helpful", LAYOUT)
    assert np.array_equal(got.head, want.head)
    assert got.adapter.pairs.keys() == want.adapter.pairs.keys()
    for path, pair in want.adapter.pairs.items():
        read = got.adapter.pairs[path]
        assert np.array_equal(read.a, pair.a)
        assert np.array_equal(read.b, pair.b)
        assert read.scale == pytest.approx(pair.scale)
    manifest = json.loads((tmp_path / "helpful" / "manifest.json").read_text())
    assert manifest["metrics"] == {"held_out_agreement": 0.9}
    assert manifest["base_fingerprint"] == FINGERPRINT
    assert set(manifest["files"]) == {"adapter_config.json", WEIGHTS}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["helpful"]


def test_the_files_are_those_of_pefts_sequence_classification(saved: RewardModelFolder, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "helpful" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tensors = load_file(tmp_path / "helpful" / WEIGHTS)
    assert tensors["base_model.model.score.weight"].shape == (1, HIDDEN)


def test_one_that_peft_has_written_needs_no_manifest(saved: RewardModelFolder, tmp_path: Path) -> None:
    change_config(tmp_path, modules_to_save=["classifier", "score"])
    assert np.array_equal(saved.load("helpful", LAYOUT).head, weights().head)


def test_unknown_names_are_refused(saved: RewardModelFolder, tmp_path: Path) -> None:
    write_peft(tmp_path / "plain", random_weights({Q0: 4}), LAYOUT, None)
    saved.check("helpful")
    for name, why in (
        ("other", "no reward model is called 'other': --adapter-dir has no such subfolder"),
        ("../helpful", "not a plain name"),
        ("plain", "no reward model is called 'plain'"),  # nobody learns so that there is such an adapter
    ):
        with pytest.raises(InvalidRequestError, match=why):
            saved.check(name)
    with pytest.raises(InvalidRequestError) as refused:
        saved.check("helpfull")
    assert str(tmp_path) not in str(refused.value), "any key may ask"
    assert "helpful" not in str(refused.value).replace("helpfull", "")
    with pytest.raises(InvalidRequestError, match="--adapter-dir"):
        RewardModelFolder(None).check("helpful")


def test_a_name_in_another_case_is_unknown(saved: RewardModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file system ignores case, so that the patterns of a key hold."""
    monkeypatch.setattr(os, "listdir", lambda folder: ["Helpful"])
    with pytest.raises(InvalidRequestError, match="no reward model is called 'helpful'"):
        saved.check("helpful")


def test_a_damaged_file_and_another_base_model_are_refused(saved: RewardModelFolder, tmp_path: Path) -> None:
    with pytest.raises(AdapterFileError, match="another base model"):
        RewardModelFolder(tmp_path, "0" * 32).check("helpful")
    file = tmp_path / "helpful" / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(AdapterFileError, match="damaged"):
        saved.load("helpful", LAYOUT)
    manifest = tmp_path / "helpful" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0.9", "0.99"))
    with pytest.raises(AdapterFileError, match=r"manifest\.json is damaged"):
        saved.check("helpful")


@pytest.mark.parametrize(
    ("head", "why"),
    [(None, "a reward model has a head"), ((1, HIDDEN + 1), "another base model"), ((2, HIDDEN), "or a classifier")],
)
def test_a_head_of_another_shape_is_refused(
    saved: RewardModelFolder, tmp_path: Path, head: tuple[int, int] | None, why: str
) -> None:
    change_config(tmp_path)
    tensors = load_file(tmp_path / "helpful" / WEIGHTS)
    del tensors["base_model.model.score.weight"]
    if head is not None:
        tensors["base_model.model.score.weight"] = np.zeros(head, np.float32)
    save_file(tensors, tmp_path / "helpful" / WEIGHTS)
    with pytest.raises(AdapterFileError, match=why):
        saved.load("helpful", LAYOUT)


def test_heads_of_other_names_are_refused(saved: RewardModelFolder, tmp_path: Path) -> None:
    for other in ("lm_head", {}, None):
        change_config(tmp_path, modules_to_save=["score", other])
        with pytest.raises(AdapterFileError, match="modules_to_save"):
            saved.check("helpful")


def test_one_that_does_not_say_what_it_is_is_refused(saved: RewardModelFolder, tmp_path: Path) -> None:
    change_config(tmp_path)
    path = tmp_path / "helpful" / "adapter_config.json"
    path.write_text(json.dumps({"task_type": "SEQ_CLS", "modules_to_save": ["score"]}))
    with pytest.raises(AdapterFileError, match="only peft_type LORA is supported, got nothing"):
        saved.check("helpful")


def test_a_name_is_taken_once(saved: RewardModelFolder, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="exists; choose another name"):
        saved.save("helpful", weights(1), LAYOUT, {})
    assert np.array_equal(saved.load("helpful", LAYOUT).head, weights().head)
    with pytest.raises(InvalidRequestError, match="start the server with --adapter-dir"):
        RewardModelFolder(None).check_new("x")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_parallm.extras.reward_models.folder.file_sums", fail)
    with pytest.raises(Exception, match="No space left on device"):
        RewardModelFolder(tmp_path, FINGERPRINT).save("helpful", weights(), LAYOUT, {})
    assert list(tmp_path.iterdir()) == []


def test_the_adapter_library_passes_them_over(
    saved: RewardModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_peft(tmp_path / "plain", random_weights({Q0: 4}), LAYOUT, None)
    library = AdapterLibrary(LAYOUT, 16, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert [name for name, _ in library.discover()] == ["plain"]
    assert not caplog.records
    with pytest.raises(AdapterFileError, match="reward_model:NAME"):
        library.read(str(tmp_path / "helpful"))
