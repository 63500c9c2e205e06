"""Loads that a server must refuse: `from main_job.bad_adapters import bad_loads, good_folder`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
from adapter_folders import mlx_lm_folder, mlx_lm_tensors, peft_folder, peft_tensors, safetensors
from main_job.serving import SERVED

HIDDEN, KV = 576, 192
Q0, V0, EMBEDDING = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.embed_tokens"
A, B = f"{Q0}.lora_a", f"{Q0}.lora_b"
SQUARE = (HIDDEN, HIDDEN)
CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
BAD_NAMES = (
    *("../x", "/abs", "%2e%2e", "..", ".hidden", "a/b", "a\\b", "a b", "nul\0", "x\n", "a@x", "é", "\ud800", ""),
    *("base", "latest", "best", "route", "rollback", "checkpoint-7", SERVED, "x" * 65, "x" * 5000),
)
BAD_TAGS = ("../x", "/abs", "%2e%2e", "nul\0", "a/b", "base", "latest", "checkpoint-7", "x" * 65, "")


def good_folder(folder: Path) -> Path:
    """An adapter of the bundled model: whoever reads it finds nothing wrong."""
    return mlx_lm_folder(folder, mlx_lm_tensors(path=Q0, shape=SQUARE))


def bad_loads(root: Path, outside: Path) -> list[tuple[str, str]]:
    """(lora_name, lora_path) pairs of a server whose one allowed root is `root`. What lies `outside` is a good adapter,
    and so is `root/good`: a load that succeeds has read what it must not, or taken a name that it must not."""
    good_folder(root / "good")
    (root / "link").symlink_to(outside)
    (root / "file").write_text("{}")
    up = Path(os.path.relpath(outside, root))
    paths = [
        *(str(outside), str(up), f"good/../{up}", str(up).replace(".", "%2e"), f"{root}/{up}", "link", "link/."),
        *("file", "nowhere", "good\0", f"good\0/../{up}", "/", "~", "/proc/self", "\ud800", "", "x" * 5000),
    ]
    contents = [str(folder) for folder in _folders(root / "contents", outside)]
    return [*((name, "good") for name in BAD_NAMES), *(("bad", path) for path in [*paths, *contents])]


def _folders(root: Path, outside: Path) -> list[Path]:
    return [*_bad_configs(root), *_bad_files(root, outside), *_bad_tensors(root)]


def _bad_configs(root: Path) -> list[Path]:
    """Of good weights."""
    texts = ["", "{", "[]", "{}", '{"lora_parameters": {"rank": 4, "scale": NaN}}', "[" * 100_000]
    folders = [good_folder(root / f"config-{i}") for i in range(len(texts))]
    for folder, text in zip(folders, texts, strict=True):
        (folder / CONFIG).write_text(text)
    return [
        *folders,
        mlx_lm_folder(root / "dora", _pair(), fine_tune_type="dora"),
        mlx_lm_folder(root / "full", _pair(), fine_tune_type="full"),
        mlx_lm_folder(root / "other-rank", _pair(), lora_parameters={"rank": 8}),
        mlx_lm_folder(root / "infinite-scale", _pair(), lora_parameters={"scale": float("inf")}),
        peft_folder(root / "peft-dora", peft_tensors(path=Q0, shape=SQUARE), use_dora=True),
        peft_folder(root / "peft-other", peft_tensors(path=Q0, shape=SQUARE), peft_type="LOHA"),
    ]


def _bad_files(root: Path, outside: Path) -> list[Path]:
    """A weights file, or a config, that is damaged, dangerous or elsewhere."""
    whole = (good_folder(root / "whole") / WEIGHTS).read_bytes()
    contents = [b"", whole[:7], whole[:100], whole[:-1], whole + b"\0", pickle.dumps([1]), safetensors({})]
    folders = [good_folder(root / f"weights-{i}") for i in range(len(contents))]
    for folder, content in zip(folders, contents, strict=True):
        (folder / WEIGHTS).write_bytes(content)
    for name in (CONFIG, WEIGHTS):
        gone, linked, pipe = (good_folder(root / f"{what}-{name}") for what in ("gone", "linked", "pipe"))
        for folder in (gone, linked, pipe):
            (folder / name).unlink()
        (linked / name).symlink_to(outside / name)
        os.mkfifo(pipe / name)
        folders += [gone, linked, pipe]
    pickled = good_folder(root / "pickled")
    (pickled / WEIGHTS).rename(pickled / "adapters.bin")
    return [*folders, pickled]


def _bad_tensors(root: Path) -> list[Path]:
    nan, infinite, double = _pair(), _pair(), _pair()
    nan[B][3, 5], infinite[A][0, 0] = np.nan, -np.inf
    double[A] = double[A].astype(np.float64)
    tensors = {
        "nan": nan,
        "infinite": infinite,
        "double": double,
        "magnitude": {**_pair(), f"{Q0}.m": np.ones(HIDDEN, np.float32)},
        "lonely": {A: _pair()[A]},
        "flat": {**_pair(), A: np.ones(HIDDEN, np.float32)},
        "wrong-shape": mlx_lm_tensors(path=V0, shape=SQUARE),
        "embedding": mlx_lm_tensors(path=EMBEDDING, shape=(49152, HIDDEN)),
        "head": mlx_lm_tensors(path="lm_head", shape=(HIDDEN, 49151)),
        "norm": mlx_lm_tensors(path="model.norm", shape=SQUARE),
        "no-such-layer": mlx_lm_tensors(path=Q0.replace("0", "30"), shape=SQUARE),
    }
    folders = [mlx_lm_folder(root / name, held) for name, held in tensors.items()]
    large = mlx_lm_tensors(17, Q0, SQUARE)
    return [*folders, mlx_lm_folder(root / "rank-17", large, lora_parameters={"rank": 17})]


def _pair() -> dict[str, np.ndarray]:
    return mlx_lm_tensors(path=Q0, shape=SQUARE)
