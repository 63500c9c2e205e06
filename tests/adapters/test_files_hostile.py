"""Reading adapters whose files lie, are missing, or lead elsewhere: weights that fit, or one clear error."""

import json
import math
import os
import struct
from dataclasses import replace

import numpy as np
import pytest
from adapter_folders import (
    LAYOUT,
    Q0,
    mlx_lm_folder,
    mlx_lm_tensors,
    peft_folder,
    peft_tensors,
    read,
    refusal,
    safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.adapters.files import AdapterRoots
from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.errors import AdapterFileError

A, B = f"{Q0}.lora_a", f"{Q0}.lora_b"
ENTRY = {"dtype": "F32", "shape": [16, 4], "data_offsets": [0, 256]}
PAIR = {A: ENTRY, B: ENTRY | {"shape": [4, 16], "data_offsets": [256, 512]}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated or damaged"),
        (b"1234567", "truncated or damaged"),
        (struct.pack("<Q", 2**63), "no safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "truncated or damaged"),
        (b"\x80\x04\x95" + b"pickle" * 9, "no safetensors file"),
        (safetensors(b"{"), "not well-formed JSON"),
        (safetensors(b"[" * 100_000), "not well-formed JSON"),
        (safetensors(b"\xff\xfe"), "not well-formed JSON"),
        (safetensors(b"[]"), "must be a JSON object"),
        (safetensors(b'{"x": 1, "x": 2}'), "'x' is there twice"),
        (safetensors(b"{}"), "holds no tensors"),
        (safetensors({A: 1}), "is malformed"),
        (safetensors({A: {"dtype": "F32"}}), "is malformed"),
        (safetensors({A: ENTRY | {"shape": [True, 4]}}), "is malformed"),
        (safetensors({A: ENTRY | {"dtype": ["F32"]}}), "is malformed"),
        (safetensors({A: ENTRY | {"shape": [-16, -4]}}), "is malformed"),
        (safetensors({A: ENTRY | {"shape": [4, 16] * 5}}), "is malformed"),
        (safetensors({A: ENTRY | {"shape": [10**300, 4]}}), "is malformed"),
        (safetensors({"\ud800": ENTRY}), "is no lora_a or lora_b"),
        (safetensors(PAIR, bytes(511)), "truncated or damaged"),
        (safetensors(PAIR, bytes(513)), "truncated or damaged"),
        (safetensors({A: ENTRY, B: ENTRY | {"shape": [4, 16]}}, bytes(512)), "truncated or damaged"),
        (safetensors(PAIR | {A: ENTRY | {"data_offsets": [0, 2**70]}}, bytes(512)), "truncated or damaged"),
        (safetensors({A: {"dtype": "F32", "shape": [16, 4]}, B: PAIR[B]}, bytes(512)), "truncated or damaged"),
        (safetensors({A: ENTRY | {"shape": [2**40, 2**40]}, B: PAIR[B]}, bytes(512)), "maps 16 to 16"),
    ],
)
def test_a_weights_file_that_lies(content, words, tmp_path):
    mlx_lm_folder(tmp_path, mlx_lm_tensors())
    (tmp_path / "adapters.safetensors").write_bytes(content)
    assert words in refusal(tmp_path)


def test_a_header_that_claims_terabytes_allocates_nothing(tmp_path):
    rank = 2**20
    layout = AdapterLayout({Q0: replace(LAYOUT.linears[Q0], in_features=2**40)}, {}, 1)
    header = {A: ENTRY | {"shape": [2**40, rank]}, B: ENTRY | {"shape": [rank, 16]}}
    mlx_lm_folder(tmp_path, mlx_lm_tensors(), lora_parameters={"rank": rank})
    (tmp_path / "adapters.safetensors").write_bytes(safetensors(header, bytes(64)))
    assert "truncated or damaged" in refusal(tmp_path, layout=layout, max_rank=rank)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not well-formed JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "neither peft_type"),
        (b'{"r": 1, "r": 2}', "'r' is there twice"),
        (b'{"lora_parameters": [4]}', "must be an object with rank and scale"),
        (b'{"a": ' * 50_000, "not well-formed JSON"),
        (b'{"lora_parameters": {"rank": ' + b"9" * 5000 + b"}}", "not well-formed JSON"),
        (b" " * 2**20 + b"{}", "larger than 1048576 bytes"),
        (b"\x00\xff", "not well-formed JSON"),
    ],
)
def test_a_config_that_is_malformed(content, words, tmp_path):
    mlx_lm_folder(tmp_path, mlx_lm_tensors())
    (tmp_path / "adapter_config.json").write_bytes(content)
    assert words in refusal(tmp_path)


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapter_model.bin", "weights.pt", "model.pth", "adapters.npz"])
def test_pickles_are_refused_unopened(name, tmp_path):
    folder = peft_folder(tmp_path, peft_tensors())
    (folder / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    os.mkfifo(folder / name)  # opening it would hang
    assert "convert it to safetensors" in refusal(folder)


def test_files_that_are_missing_or_not_regular(tmp_path):
    assert "there is no adapter_config.json" in refusal(tmp_path / "nowhere")
    folder = mlx_lm_folder(tmp_path / "a", mlx_lm_tensors())
    (folder / "adapters.safetensors").unlink()
    assert "there is no adapters.safetensors" in refusal(folder)
    (folder / "adapters.safetensors").mkdir()
    assert "not a regular file" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    assert "not a regular file" in refusal(folder)


def test_a_file_that_is_not_regular_does_not_stay_open(tmp_path):
    """The lowest descriptor that is free is the next one."""
    os.close(free := os.open(os.devnull, os.O_RDONLY))
    folder = mlx_lm_folder(tmp_path, mlx_lm_tensors())
    (folder / "adapters.safetensors").unlink()
    (folder / "adapters.safetensors").mkdir()
    refusal(folder)
    os.close(now := os.open(os.devnull, os.O_RDONLY))
    assert now == free


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
@pytest.mark.parametrize("exists", [True, False])
def test_symlinks_out_of_the_root_are_not_followed(name, exists, tmp_path):
    folder = mlx_lm_folder(tmp_path / "root" / "a", mlx_lm_tensors())
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    assert read(folder).weights.rank == 4  # nothing is wrong with the content
    if not exists:
        outside.unlink()
    assert f"{name} leads out of the allowed adapter roots" in refusal(folder, roots=AdapterRoots([tmp_path / "root"]))


def test_a_hub_cache_of_symlinks_into_its_blobs_is_read(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    mlx_lm_folder(snapshot, mlx_lm_tensors())
    (tmp_path / "models--x" / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(tmp_path / "models--x" / "blobs" / str(i))
        file.symlink_to(f"../../blobs/{i}")
    roots = AdapterRoots([tmp_path])
    assert read(roots.resolve("models--x/snapshots/abc"), roots=roots).weights.rank == 4


# ---- whatever the folder holds -----------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_or_refuse(folder):
    """Good weights or our error; anything else fails the test."""
    try:
        pairs = read(folder).weights.pairs
    except AdapterFileError:
        return
    assert pairs
    assert all(np.isfinite(pair.a).all() and math.isfinite(pair.scale) for pair in pairs.values())


def folder_of(form, path):
    return mlx_lm_folder(path, mlx_lm_tensors()) if form == "mlx-lm" else peft_folder(path, peft_tensors())


@fuzz
@given(form=st.sampled_from(["mlx-lm", "peft"]), name=st.sampled_from(["config", "weights"]), content=st.binary())
def test_random_bytes(form, name, content, tmp_path):
    folder = folder_of(form, tmp_path / form)
    (folder / "adapter_config.json" if name == "config" else next(folder.glob("*.safetensors"))).write_bytes(content)
    read_or_refuse(folder)


@fuzz
@given(form=st.sampled_from(["mlx-lm", "peft"]), cut=st.floats(0, 1, exclude_max=True), config=st.booleans())
def test_truncated_files_are_refused(form, cut, config, tmp_path):
    folder = folder_of(form, tmp_path / form)
    file = folder / "adapter_config.json" if config else next(folder.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[: int(cut * len(content))])
    refusal(folder)


@fuzz
@given(form=st.sampled_from(["mlx-lm", "peft"]), place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_one_changed_byte_of_the_weights(form, place, byte, tmp_path):
    folder = folder_of(form, tmp_path / form)
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[int(place * 300)] = byte
    file.write_bytes(content)
    read_or_refuse(folder)


@fuzz
@given(form=st.sampled_from(["mlx-lm", "peft"]), data=st.data())
def test_changed_values_of_the_config(form, data, tmp_path):
    folder = folder_of(form, tmp_path / form)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    target = config.get("lora_parameters", config) if data.draw(st.booleans()) else config
    for key in data.draw(st.lists(st.sampled_from(sorted(target)), min_size=1, max_size=2)):
        target[key] = data.draw(JSON)
    path.write_text(json.dumps(config))
    read_or_refuse(folder)


@fuzz
@given(entry=st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), JSON), name=st.text(max_size=8))
def test_changed_entries_of_the_header(entry, name, tmp_path):
    folder = folder_of("mlx-lm", tmp_path)
    header = {A: ENTRY | entry, B: PAIR[B]} | ({name: ENTRY} if name else {})
    (folder / "adapters.safetensors").write_bytes(safetensors(header, bytes(512)))
    read_or_refuse(folder)
