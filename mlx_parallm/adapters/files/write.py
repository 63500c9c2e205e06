"""Writes an adapter in mlx-lm's or PEFT's format. The files are on the disk when a call returns; use
`atomic` to make the directory appear whole or not at all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from mlx_parallm import atomic
from mlx_parallm.adapters.files.disk import CONFIG_FILE, problem
from mlx_parallm.adapters.files.formats import (
    MLX_LM_WEIGHTS,
    PEFT_WEIGHTS,
    PREFIX,
    SCORE,
    SCORE_WEIGHT,
    SCORER_TASK,
    FormatName,
    block_of,
    transformers_path,
)
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, Array, LinearSpec, LoRAPair, lora_alpha

Float = NDArray[np.floating[Any]]


def write_mlx_lm(
    folder: Path, weights: AdapterWeights, layout: AdapterLayout, extra: Mapping[str, Any] | None = None
) -> None:
    """Writes `adapters.safetensors` and a config that mlx-lm's `load_adapters` reads. `extra`: more keys of the config.

    The format has one rank and one scale for all linears, so the largest are taken. Pairs of a smaller rank are padded
    with zeros, and the b of a pair with another scale is rescaled.
    """
    rank, scale = weights.rank, max((pair.scale for pair in weights.pairs.values()), key=abs)
    tensors: dict[str, Float] = {}
    for path, pair in weights.pairs.items():
        a, b = _padded(_stored(pair.a), rank, axis=-1), _padded(_rescaled(pair, scale), rank, axis=-2)
        tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"] = map(_of_mlx_lm, (a, b))
    blocks = [block_of(path) for path in weights.pairs]
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": sorted({key for _, key in blocks})}
    first = min((index for index, _ in blocks if index is not None), default=layout.layers)
    config = {
        **(extra or {}),
        "fine_tune_type": "lora",
        "num_layers": layout.layers - first,
        "lora_parameters": parameters | ({"use_rslora": True} if weights.rslora else {}),
    }
    _write(folder, MLX_LM_WEIGHTS, save(tensors, {"format": "mlx"}), config)


def write_peft(
    folder: Path, weights: AdapterWeights, layout: AdapterLayout, base_model: str | None, head: Float | None = None
) -> None:
    """Writes `adapter_model.safetensors` and a LoraConfig that PEFT, Transformers and vLLM read.

    Args:
        base_model: the hub id or directory for `base_model_name_or_path`.
        head: of a reward model, [hidden]: the weight of Transformers' `score`, a linear without a bias.
    """
    spelled = _in_transformers(weights, layout)
    tensors, config = _factors(spelled), _lora_config(spelled, layout, base_model)
    if head is not None:
        tensors[SCORE_WEIGHT] = np.ascontiguousarray(head, np.float32)[None]
        config |= {"task_type": SCORER_TASK, "modules_to_save": [SCORE]}
    _write(folder, PEFT_WEIGHTS, save(tensors, {"format": "pt"}), config)


def write_adapter(
    folder: Path, form: FormatName, weights: AdapterWeights, layout: AdapterLayout, base_model: str | None = None
) -> None:
    """Writes an adapter in one of the two formats; see `write_mlx_lm` and `write_peft`."""
    if form == "peft":
        write_peft(folder, weights, layout, base_model)
    else:
        write_mlx_lm(folder, weights, layout)


def _in_transformers(weights: AdapterWeights, layout: AdapterLayout) -> AdapterWeights:
    """The pairs by Transformers' paths. Linears that are one there get one pair."""
    pairs: dict[str, LoRAPair] = {}
    for path, pair in weights.pairs.items():
        name = transformers_path(path, layout)
        parts = layout.spelled(name)
        pairs[name] = pair if len(parts) < 2 else _joined([weights.pairs.get(spec.path) for spec in parts], parts)
    return AdapterWeights(pairs, weights.rslora)


def _joined(pairs: Sequence[LoRAPair | None], specs: Sequence[LinearSpec]) -> LoRAPair:
    """One pair of linears with the same input whose outputs are those of one linear, one after the other. Pairs with
    the same a keep it; others lie side by side, so their ranks add up."""
    given = [pair for pair in pairs if pair is not None]
    shared = all(np.array_equal(_stored(pair.a), _stored(given[0].a)) for pair in given)
    a = _stored(given[0].a) if shared else np.concatenate([_stored(pair.a) for pair in given], axis=1)
    b = np.zeros((a.shape[1], sum(spec.out_features for spec in specs)), np.float32)
    scale = max((pair.scale for pair in given), key=abs)
    row = column = 0
    for pair, spec in zip(pairs, specs, strict=True):
        if pair is not None:
            b[row : row + pair.rank, column : column + spec.out_features] = _rescaled(pair, scale)
            row += 0 if shared else pair.rank
        column += spec.out_features
    return LoRAPair(a, b, scale)


def _factors(weights: AdapterWeights) -> dict[str, Float]:
    """`weights`: by Transformers' paths."""
    if experts := next((path for path, pair in weights.pairs.items() if pair.a.ndim == 3), None):
        raise problem(f"expert LoRA cannot be written in PEFT's format: {experts}; write it in mlx-lm's")
    tensors: dict[str, Float] = {}
    for path, pair in weights.pairs.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = np.ascontiguousarray(_stored(pair.a).T)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = np.ascontiguousarray(_stored(pair.b).T)
    return tensors


def _lora_config(weights: AdapterWeights, layout: AdapterLayout, base_model: str | None) -> dict[str, Any]:
    ranks = {path: pair.rank for path, pair in weights.pairs.items()}
    alphas = {path: lora_alpha(pair.scale, pair.rank, weights.rslora) for path, pair in weights.pairs.items()}
    alphas = {path: int(alpha) if alpha.is_integer() else alpha for path, alpha in alphas.items()}  # PEFT has an int
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {path: value for path, value in ranks.items() if value != rank},
        "alpha_pattern": {path: value for path, value in alphas.items() if value != alpha},
        "target_modules": _target_modules(weights, layout),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": weights.rslora,
    }


def _target_modules(weights: AdapterWeights, layout: AdapterLayout) -> list[str]:
    """Names such as q_proj, if all linears of that name have a pair; else the whole paths of those that have one."""
    every = {transformers_path(path, layout) for path in layout.linears}
    partial = {path.rpartition(".")[2] for path in every - weights.pairs.keys()}
    names = {path.rpartition(".")[2] for path in weights.pairs}
    return sorted((names - partial) | {path for path in weights.pairs if path.rpartition(".")[2] in partial})


def _stored(array: Array) -> Float:
    """A NumPy array: float16 stays as it is, everything else becomes float32."""
    plain: Float = np.asarray(array)
    return plain if plain.dtype in (np.float16, np.float32) else plain.astype(np.float32)


def _rescaled(pair: LoRAPair, scale: float) -> Float:
    """The b that gives the same product with `scale` in place of the pair's own scale."""
    b = _stored(pair.b)
    return b if pair.scale == scale else b.astype(np.float32) * np.float32(pair.scale / scale)


def _padded(array: Float, rank: int, axis: int) -> Float:
    missing = [(0, 0)] * array.ndim
    missing[axis] = (0, rank - array.shape[axis])
    return np.ascontiguousarray(np.pad(array, missing))


def _of_mlx_lm(factor: Float) -> Float:
    """A factor as mlx-lm stores it: [in, rank] or [rank, out], and [experts, rank, in] or [experts, out, rank]."""
    return np.ascontiguousarray(factor.swapaxes(1, 2)) if factor.ndim == 3 else factor


def _write(folder: Path, name: str, data: bytes, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_file(folder / name, data)
    atomic.write_file(folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
