"""Compares an adapter where it was exported to with the same adapter here: log-probabilities of every token.

    python benchmarks/studies/exports.py --llama-cpp LLAMA_CPP [--python ELSEWHERE/bin/python] [--only bundled llama …]
        [--work DIR] [--out FILE]

Random adapters, of ranks and scales that differ between linears, on the bundled model and on tiny models of each
architecture that `adapters export --to gguf` knows. PEFT and mlx-lm load the adapter, mlx-lm the fused model,
llama.cpp the GGUF adapter beside its own float32 file of the base, and the fused model as its converter writes it; of
the bundled model, the adapter also beside the file as it was published, of 4 bits, where llama.cpp rounds activations
to 8. Its converter does not take fused models with experts or convolutions.

LLAMA_CPP are the sources from which llama.cpp's Python binding is compiled, which have the converter of models:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 && tar xf llama_cpp_python-*.tar.gz
    LLAMA_CPP=llama_cpp_python-0.3.36/vendor/llama.cpp

The other programs run in an environment of their own, ELSEWHERE. By default uv makes and keeps it, which compiles
llama.cpp for some 20 minutes and downloads 3 GB.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx_lm
import numpy as np
from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LoRAPair
from mlx_parallm.errors import AdapterFileError
from mlx_parallm.model.bundled import bundled_path, bundled_tokenizer
from mlx_parallm.model.device import prepare_device
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.model.loading import load
from mlx_parallm.model.merge import export_adapter, merge

BUNDLED = "bundled"
PROGRAM = Path(__file__).parents[1] / "lib" / "programs" / "exports_elsewhere.py"
RANK, TOKENS, SEED = 8, 24, 0
FLOOR, MOST_TIMES = 2e-5, 3.0
"""Nats by which float32 programs differ, each of which sums in an order of its own; and how many times the difference
of the base models that of adapters may be."""
_COMMON = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 259, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "initializer_range": 0.2},
    **{"max_position_embeddings": 256, "tie_word_embeddings": False, "rope_theta": 10000.0},
    **{"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258},
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": _EXPERTS | {"intermediate_size": 32},
    "smollm3": {},
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True},
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"num_hidden_layers": 6},
    "phi3": {},
    "olmo2": {},
    "olmoe": _EXPERTS | {"intermediate_size": 32, "num_key_value_heads": 4},
    "lfm2": {
        **{
            "full_attn_idxs": [1],
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
        },
        **{"block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 8, "block_auto_adjust_ff_dim": False},
        **{"block_ffn_dim_multiplier": 1.0, "conv_bias": False, "tie_word_embeddings": True},
    },
}
COLUMNS = ("peft", "mlx", "fused", "fused gguf", "gguf", "gguf packed")


@dataclass(slots=True)
class Exported:
    """One base model. `moved`: how far the adapter moves a log-probability, at most. `apart`: by what opened it, the
    largest difference from the log-probabilities here, in nats. `base`: that of the model without an adapter in
    llama.cpp. `refused`: why a format was not written."""

    name: str
    moved: float
    apart: dict[str, float] = field(default_factory=dict)
    base: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    prepare_device()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        folders = [work / name for name in arguments.only]
        for folder in folders:
            _prepare(folder)
        _elsewhere(arguments.python, "make", arguments.llama_cpp, *folders)
        found = [_export(folder) for folder in folders]
        _elsewhere(arguments.python, "compute", arguments.llama_cpp, *folders)
        rows = [_compared(folder, row, here) for folder, (row, here) in zip(folders, found, strict=True)]
    figures = list(_figures(rows))
    report.show(figures, _table(rows))
    report.write(arguments.out, {"machine": before, "rows": [asdict(row) for row in rows]}, figures)
    return int(any(figure.met is False for figure in figures))


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True)
    if folder.name == BUNDLED:
        shutil.copy(bundled_path(), folder / "packed.gguf")
        base = load(None, dequantize=False)
        zeros = _random(adapter_layout(base.model), 0.0)
        write_mlx_lm(folder / "nothing", zeros, adapter_layout(base.model))
        merge(None, folder / "nothing", folder / "model", dequantize=True)
    else:
        config = {"model_type": folder.name, **_COMMON, **FAMILIES[folder.name]}
        (folder / "config.json").write_text(json.dumps(config))
        bundled_tokenizer().save_pretrained(folder / "model")  # no token is looked up, but a model has one


def _elsewhere(python: Path | None, *arguments: object) -> None:
    program = [python] if python else ["uv", "--quiet", "run", "--python", sys.executable, "--script"]
    variables = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [*map(str, (*program, PROGRAM, *arguments))]
    subprocess.run(command, env=os.environ | variables | {"HF_HUB_OFFLINE": "1"}, check=True)


def _export(folder: Path) -> tuple[Exported, dict[str, np.ndarray]]:
    """Writes an adapter in every format. Returns what was found here: the log-probabilities of the base, of the adapter
    as it is served, and of what mlx-lm loads."""
    model_path = str(folder / "model")
    base = load(model_path, dequantize=True)
    layout = adapter_layout(base.model, base.source)
    weights = _random(layout, 0.5 if folder.name != BUNDLED else 0.1)
    write_mlx_lm(folder / "adapter", weights, layout)
    tokens = np.random.default_rng(SEED).integers(0, 256, TOKENS).tolist()
    (folder / "tokens.json").write_text(json.dumps(tokens))
    here = {"base": _log_probabilities(base.model, tokens)}
    install_adapters(base.model, bank := AdapterBank(layout, 1, weights.rank, mx.float32))
    with bank.using(OneAdapter(weights, mx.float32)):
        here["served"] = _log_probabilities(base.model, tokens)
    row = Exported(folder.name, float(np.abs(here["served"] - here["base"]).max()))
    for form, name in (("peft", "peft"), ("mlx-lm", "mlx"), ("gguf", "gguf")):
        try:
            export_adapter(model_path, folder / "adapter", folder / name, form)
        except AdapterFileError as error:  # experts
            row.refused[name] = str(error)
    merge(model_path, folder / "adapter", folder / "fused")
    here["mlx"] = _log_probabilities(mlx_lm.load(model_path, adapter_path=str(folder / "mlx"))[0], tokens)
    here["fused"] = _log_probabilities(mlx_lm.load(str(folder / "fused"))[0], tokens)
    return row, here


def _random(layout: AdapterLayout, size: float) -> AdapterWeights:
    """Factors on all linears but a tied head, of ranks from 2 to `RANK` and three scales."""
    rng = np.random.default_rng(SEED)
    pairs = {}
    for number, spec in enumerate(spec for spec in layout if not spec.embedding):
        rank, scale = 2 + number % (RANK - 1), 2.0 - 0.25 * (number % 3)
        a = rng.normal(size=spec.a_shape(rank)) / np.sqrt(spec.in_features)
        b = rng.normal(size=spec.b_shape(rank)) * size / np.sqrt(rank) / scale
        pairs[spec.path] = LoRAPair(a.astype(np.float32), b.astype(np.float32), scale)
    return AdapterWeights(pairs)


def _log_probabilities(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    return np.array(nn.log_softmax(model(mx.array([tokens]))[0].astype(mx.float32)))


def _compared(folder: Path, row: Exported, here: dict[str, np.ndarray]) -> Exported:
    there = dict(np.load(folder / "elsewhere.npz"))
    for name in COLUMNS:
        if (found := here.get(name, there.get(name))) is not None:
            row.apart[name] = float(np.abs(found - here["served"]).max())
        if (found := there.get(f"{name}, base")) is not None:
            row.base[name] = float(np.abs(found - here["base"]).max())
    return row


def _figures(rows: Sequence[Exported]) -> Iterator[Figure]:
    for name in ("mlx", "fused"):
        worst = max(row.apart[name] for row in rows)
        yield Figure(f"{name}: largest difference of a log-probability", "nats x 1e-6", *reported([1e6 * worst]), 100)
    for name, base in {"peft": "peft", "gguf": "gguf", "fused gguf": "gguf", "gguf packed": "gguf packed"}.items():
        compared = [(row.apart[name], row.base[base]) for row in rows if name in row.apart]
        if compared:
            worst = max(apart for apart, _ in compared)
            yield Figure(f"{name}: largest difference of a log-probability", "nats x 1e-6", *reported([1e6 * worst]))
            ratio = max(apart / max(base, FLOOR) for apart, base in compared)
            yield Figure(f"{name}: at most so many times that without an adapter", "", *reported([ratio]), MOST_TIMES)
    yield Figure("least that an adapter moves one", "nats", *reported([min(row.moved for row in rows)]), 1, True)


def _table(rows: Sequence[Exported]) -> Table:
    table = Table("base", "moved", *COLUMNS, "gguf, no adapter", title="largest difference of a log-probability, nats")
    for row in rows:
        cells = [f"{row.apart[name]:.1e}" if name in row.apart else "-" for name in COLUMNS]
        table.add_row(row.name, f"{row.moved:.1f}", *cells, f"{row.base['gguf']:.1e}")
    return table


def _arguments() -> argparse.Namespace:
    names = (BUNDLED, *FAMILIES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's sources")
    parser.add_argument("--python", type=Path, help="of an environment with PEFT and llama-cpp-python")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="base models")
    parser.add_argument("--work", type=Path, help="folder to keep what was written in")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "exports.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
