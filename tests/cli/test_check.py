"""`mlx_parallm check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_checks import CONFIGURATIONS, build
from tiny import save_directory

from mlx_parallm.cli.main import main


@pytest.mark.parametrize(
    ("name", "how", "parts"),
    [("gemma2", "batched", "layers.*.self_attn"), ("gpt_bigcode", "row by row", "transformer")],
)
def test_it_says_how_a_model_runs(
    name: str, how: str, parts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_directory(build(name), CONFIGURATIONS[name], tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert how in shown
    assert parts in shown
    assert shown.count("passed") == 4
    assert main(["check", str(tmp_path), "--json", "--row-by-row"]) == 0
    assert json.loads(capsys.readouterr().out)["compatible"]


def test_only_layers_of_each_kind_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIGURATIONS["qwen3_5"]}
    save_directory(build("qwen3_5"), config, tmp_path)
    main(["check", str(tmp_path), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["in_parts"] == ["language_model.model.layers.*.linear_attn"]
    assert data["layers"].endswith(f" of {len(build('qwen3_5').layers)}")


def test_a_model_that_mlx_lm_cannot_load_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_directory(build("olmo2"), CONFIGURATIONS["olmo2"] | {"model_type": "no_such_architecture"}, tmp_path)
    assert main(["check", str(tmp_path)]) == 1
    assert "cannot load" in capsys.readouterr().err
