"""llama.cpp: reads exported adapters beside its own file of the base model, and a fused model."""

import json
import sys
import tarfile
from pathlib import Path

import pytest
from clients.running import UV, Report, printed

ROOT = Path(__file__).parents[2]
BINDING = "llama-cpp-python"


@pytest.mark.large("compiles llama.cpp")
def test_it_computes_what_an_exported_adapter_computes_here(tmp_path: Path, report: Report) -> None:
    """PEFT and mlx-lm too. The limits are those of the benchmark."""
    printed(*UV, "tool", "run", "pip", "download", "--no-deps", "--no-binary", BINDING, BINDING, at=tmp_path)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sources:
        sources.extractall(tmp_path, filter="data")
    llama_cpp, record = next(tmp_path.glob("*/vendor/llama.cpp")), tmp_path / "exports.json"
    study = (sys.executable, "-m", "benchmarks.studies.exports", "--llama-cpp", str(llama_cpp), "--out", str(record))
    printed(*study, "--only", "llama", "qwen3_moe", at=ROOT)
    for figure in json.loads(record.read_text())["figures"]:
        bound = figure["limit"], figure["at_least"]
        report(f"exports: {figure['name']}", figure["value"]["median"], figure["unit"], *bound)
