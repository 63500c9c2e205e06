import json
import os
import subprocess
import sys

import mlx.core as mx
import pytest
from family_checks import CONFIGURATIONS, build
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from tiny import (
    EOS_ID,
    FAMILIES,
    VOCAB_SIZE,
    build_model,
    save_directory,
    save_tiny,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from transformers import AutoTokenizer

from mlx_parallm.errors import ModelNotFoundError, UnsupportedModelError
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.layer_state import LayerSpec
from mlx_parallm.model.loading import save_tokenizer
from mlx_parallm.model.manager import SharedModelManager

TOKENS = mx.array([[1, 5, 9, 33, 77, 2, 250, 100, 30, 4, 66, 7]])


def load(path, **options):
    return SharedModelManager(str(path), progress=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_from_a_directory(family, tmp_path):
    model = save_tiny(family, tmp_path / "some-model")
    loaded = load(tmp_path / "some-model")
    assert relative_error(loaded.model(TOKENS), model(TOKENS)) < 1e-5
    assert loaded.family.tested
    assert loaded.plan.layout.dtype == mx.float32
    assert (loaded.card.name, loaded.card.dtype, loaded.card.quantization) == ("some-model", "float32", "none")
    assert (loaded.card.context_length, loaded.card.vocab_size) == (4096, VOCAB_SIZE)
    assert loaded.tokenizer.eos_token_ids == {EOS_ID}


def test_windows_are_those_of_mlx_lms_own_caches():
    full, sliding = LayerSpec(2, 16, 16), LayerSpec(2, 16, 16, window=8)
    assert prepare(tiny_model("gemma3")).layout.layers == (sliding, full, sliding, full)
    assert prepare(tiny_model("llama")).layout.layers == (full, full)
    mixed = tiny_model("llama", layer_types=["full_attention", "sliding_attention"], sliding_window=8)
    assert prepare(mixed).layout.layers == (full, sliding)


def test_a_window_that_only_the_mask_has_is_found(monkeypatch):
    model = tiny_model("gemma3_text")
    windows = [spec.window for spec in prepare(model).layout.layers]
    monkeypatch.setattr(type(model), "make_cache", lambda self: [KVCache() for _ in self.layers])
    assert [spec.window for spec in prepare(model).layout.layers] == windows
    assert 8 in windows


def test_stored_types_become_float32_on_a_cpu(tmp_path):
    model = tiny_model("qwen2")
    model.set_dtype(mx.bfloat16)
    save_directory(model, tiny_config("qwen2"), tmp_path)
    loaded = load(tmp_path)
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert loaded.model(TOKENS).dtype == mx.float32


@pytest.mark.parametrize("path", ["/no/such/dir", "./nowhere", "~/nowhere-at-all", "too/many/parts"])
def test_a_missing_directory_is_said_to_be_missing(path):
    with pytest.raises(ModelNotFoundError, match="no model directory"):
        SharedModelManager(path, progress=False)


def test_a_directory_without_a_model_says_what_lacks(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        load(tmp_path)


def test_an_unreachable_hub_id_is_not_found(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="no hub model"):
        SharedModelManager("nobody/no-such-model", progress=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_file": "evil.py"}, "trust_remote_code"),
        ({"model_type": "no_such_architecture"}, "not supported"),
        ({"num_hidden_layers": 3}, "cannot load"),
        ({"hidden_size": 128}, "cannot load"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(change, reason, tmp_path):
    save_tiny("llama", tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')")
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config("llama"), **change}))
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("name", ["granitemoehybrid", "mamba2", "exaone4"])
def test_a_config_that_transformers_refuses_and_mlx_lm_reads(name, tmp_path):
    """Its class for the architecture checks sizes and types that mlx-lm's tests do not keep."""
    config = {"max_position_embeddings": 512, **CONFIGURATIONS[name]}
    save_directory(build(name), config, tmp_path)
    with pytest.raises(Exception, match=r"Mamba head state|time_step_limit|unsupported operand"):
        AutoTokenizer.from_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.tokenizer.encode("hi") == tiny_tokenizer().encode("hi")
    save_tokenizer(str(tmp_path), tmp_path / "apart")
    assert (tmp_path / "apart" / "tokenizer.json").exists()


def test_a_directory_without_a_tokenizer_says_so(tmp_path):
    save_tiny("llama", tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    with pytest.raises(UnsupportedModelError, match=r"the tokenizer of .* cannot be loaded"):
        load(tmp_path)


def test_remote_code_of_a_tokenizer_does_not_run(tmp_path):
    save_tiny("llama", tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="trust_remote_code"):
        load(tmp_path)


def test_positions_that_depend_on_the_whole_row_need_rows_one_by_one(tmp_path):
    config = {**tiny_config("llama"), "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    save_directory(build_model(config), config, tmp_path)
    assert load(tmp_path).plan.compatible


def test_a_model_without_attention_needs_no_declared_context(tmp_path):
    config = {key: value for key, value in tiny_config("mamba").items() if key != "max_position_embeddings"}
    save_directory(tiny_model("mamba"), config, tmp_path)
    assert load(tmp_path).card.context_length == 131_072


def test_progress_goes_to_stderr_as_plain_lines(tmp_path, capfd):
    save_tiny("llama", tmp_path / "m")
    SharedModelManager(str(tmp_path / "m"), progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loaded m: " in err
    assert "\r" not in err
    assert "\x1b" not in err


@pytest.mark.parametrize("path", ["", os.environ["PATH"]])
def test_generation_neither_needs_nor_calls_a_compiler(path, tmp_path):
    """gelu is a compiled function: on a CPU, MLX builds it with g++ under TMPDIR and loads it from there."""
    save_tiny("gemma3_text", tmp_path / "model")
    program = (
        "from mlx_parallm.model.manager import SharedModelManager; import mlx.core as mx, sys;"
        "mx.eval(SharedModelManager(sys.argv[1], progress=False).model(mx.array([[1, 2, 3]])))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
