"""An average of adapters as it is served, and `mlx_parallm adapters average` with an evaluation, on a tiny model."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lora import layout_of, merged, random_adapter
from tiny import save_tiny, tiny_model

from mlx_parallm import RetrainEngine
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.cli.main import main
from mlx_parallm.errors import AdapterFileError, ConfigError, ModelNotFoundError
from mlx_parallm.model.merge import write_average

pytestmark = pytest.mark.ci

PROMPT = [72, 101, 108, 108, 111]
SHARES = [0.5, 0.3, 0.2]
FINGERPRINT = """
def score(sample):
    return sum(map(ord, sample.text)) % 97 / 97
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The folders of three adapters of the model in `tmp_path`/model; the third has the head too."""
    layout = layout_of(save_tiny("llama", tmp_path / "model"))
    made = [tmp_path / name for name in "abc"]
    targets = [("q_proj", "v_proj"), ("q_proj", "down_proj"), ("o_proj", "lm_head")]
    for seed, (folder, names) in enumerate(zip(made, targets, strict=True)):
        write_peft(folder, random_adapter(layout, seed, rank=2 + seed, targets=names, size=2.0), layout, None)
    return made


def mean_model(folders: list[Path]):
    """mlx-lm's own model, its weights changed by the mean of what the adapters add to them."""
    model = tiny_model("llama")
    layout = layout_of(model)
    for share, folder in zip(SHARES, folders, strict=True):
        weights = read_adapter(folder, layout, 16).weights
        shared = {path: LoRAPair(pair.a, pair.b, share * pair.scale) for path, pair in weights.pairs.items()}
        model = merged(model, AdapterWeights(shared))
    return model


def test_the_served_average_is_the_averaged_product(folders: list[Path], tmp_path: Path) -> None:
    write_average(str(tmp_path / "model"), folders, tmp_path / "mean", "peft", SHARES)
    engine = RetrainEngine(tmp_path / "model", server__kv_cache_memory="16MB")
    try:
        engine.reload_weights(tmp_path / "mean")
        ((result,),) = engine.generate([PROMPT], 1, 8, 1.0, 1.0)
    finally:
        engine.shutdown()
    for model, agrees in ((mean_model(folders), True), (tiny_model("llama"), False)):
        logits = model(mx.array([[*PROMPT, *result.token_ids]]))[0, len(PROMPT) - 1 : -1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        drawn = np.array(mx.take_along_axis(logprobs, mx.array(result.token_ids)[:, None], axis=-1))[:, 0]
        assert np.allclose(result.logprobs, drawn, atol=1e-4) is agrees


def average(tmp_path: Path, *arguments: object) -> int:
    return main(["adapters", "average", *map(str, arguments), "--model-path", str(tmp_path / "model")])


def test_the_command_says_what_the_rank_costs(folders: list[Path], tmp_path: Path, capsys) -> None:
    options = ("--weights", 0.5, 0.3, 0.2, "--out")
    assert average(tmp_path, *folders, *options, tmp_path / "exact") == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'exact'}: the mean of 3 adapters, rank 5, which is exact\n"
    assert average(tmp_path, *folders, *options, tmp_path / "low", "--rank", 2, "--to", "mlx") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"wrote {tmp_path / 'low'}: the mean of 3 adapters, rank 2 of 5"
    assert second.startswith("lost by the lower rank: 0.")
    assert "of the Frobenius norm, 0." in second
    assert second.endswith(", the worst")
    assert (tmp_path / "low" / "adapters.safetensors").exists()


@pytest.mark.timeout(120)
def test_the_adapters_and_the_average_answer_the_same_tasks(folders: list[Path], tmp_path: Path, capsys) -> None:
    """Two equal adapters have their own reward as their average; another adapter has another one."""
    (tmp_path / "rewards.py").write_text(FINGERPRINT)
    (tmp_path / "held-out.jsonl").write_text("".join(f'{{"prompt": "number {n}"}}\n' for n in range(4)))
    evaluation = ("--eval-tasks", tmp_path / "held-out.jsonl", "--reward", f"{tmp_path / 'rewards.py'}:score")
    a, b, _ = folders
    assert average(tmp_path, a, b, a, "--rank", 4, "--out", tmp_path / "of-two", "--max-tokens", 6, *evaluation) == 0
    _, _, _, first, second, third, of_two = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{a} ")
    assert first.split()[1:] == third.split()[1:] != second.split()[1:]
    assert of_two.startswith("the average ")
    assert of_two.split()[-2:] == ["4", "0"]
    assert of_two.split()[2:] not in (first.split()[1:], second.split()[1:])
    assert average(tmp_path, a, a, "--rank", 2, "--out", tmp_path / "same", "--max-tokens", 6, *evaluation) == 0
    *_, one, _, same = capsys.readouterr().out.splitlines()
    assert one.split()[1:] == same.split()[2:] == first.split()[1:]


@pytest.mark.timeout(120)
def test_an_evaluation_that_fails_leaves_nothing(folders: list[Path], tmp_path: Path, capsys) -> None:
    (tmp_path / "rewards.py").write_text("def score(sample):\n    raise ValueError('broken')\n")
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    evaluation = ("--eval-tasks", tmp_path / "held-out.jsonl", "--reward", f"{tmp_path / 'rewards.py'}:score")
    before = sorted(os.listdir(tmp_path))
    assert average(tmp_path, *folders, "--out", tmp_path / "mean", "--max-tokens", 4, *evaluation) == 1
    assert "error: the adapters were not evaluated: 2 of 2 held-out tasks failed" in capsys.readouterr().err
    assert [name for name in sorted(os.listdir(tmp_path)) if name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "b"), "the following arguments are required: --out"),
        (("a", "b", "--out", "d", "--weights", "x"), "argument --weights: invalid float value: 'x'"),
        (("a", "b", "--out", "d", "--reward", "r.py:score"), "--reward: there is no evaluation; add --eval-tasks"),
        (("a", "b", "--out", "d", "--eval-tasks", "none.jsonl"), "none.jsonl"),
        (("a", "b", "--out", "d", "--eval-tasks", "words", "--reward", "judge"), "--judge-url: a judge needs a server"),
    ],
)
def test_arguments_are_refused_before_a_model_is_loaded(arguments, message, tmp_path: Path, capsys) -> None:
    assert average(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_averaged_is_refused_by_name_and_nothing_is_written(folders: list[Path], tmp_path: Path) -> None:
    a, b, c = folders
    layout = layout_of(tiny_model("llama", intermediate_size=128))
    write_peft(tmp_path / "other", random_adapter(layout, 1), layout, None)
    before, model = sorted(os.listdir(tmp_path)), str(tmp_path / "model")
    with pytest.raises(AdapterFileError, match=r"/other: .* is it of another base model\?"):
        write_average(model, [a, tmp_path / "other"], tmp_path / "mean", "peft")
    with pytest.raises(AdapterFileError, match=r"/model: .*adapter_config\.json"):
        write_average(model, [a, tmp_path / "model"], tmp_path / "mean", "peft")
    with pytest.raises(AdapterFileError, match=r"/none: "):
        write_average(model, [a, tmp_path / "none"], tmp_path / "mean", "peft")
    with pytest.raises(ConfigError, match="exists: name a directory that does not"):
        write_average(model, [a, b], c, "peft")
    with pytest.raises(ModelNotFoundError):
        write_average(str(tmp_path / "nowhere"), [a, b], tmp_path / "mean", "peft")
    assert sorted(os.listdir(tmp_path)) == before
