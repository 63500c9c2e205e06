"""RetrainEngine: retrain's contract in this process. Its weights come from PyTorch there, and from NumPy here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lora import merged, random_adapter
from tiny import save_tiny, tiny_model

from mlx_parallm import RetrainEngine
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.errors import AdapterFileError, ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError
from mlx_parallm.extras.retrain.engine import ADAPTER
from mlx_parallm.model.layout import adapter_layout

PROMPTS = [[72, 101, 108, 108, 111], [87, 111]]
EOS = 257


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retrain") / "model"
    save_tiny("llama", path)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RetrainEngine]:
    made = RetrainEngine(model, lora_alpha=8.0, server__kv_cache_memory="16MB")
    yield made
    made.shutdown()
    made.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        made.generate(PROMPTS, 1, 1, 1.0, 1.0)


def layout():
    return adapter_layout(tiny_model("llama"))


def state_dict_of(weights: AdapterWeights) -> dict[str, np.ndarray]:
    """The adapter as `dict(peft_model.named_parameters())` has it, with a parameter that is no LoRA."""
    state = {"base_model.model.model.norm.weight": np.ones(3, np.float32)}
    for path, pair in weights.pairs.items():
        state[f"base_model.model.{path}.lora_A.default.weight"] = np.asarray(pair.a).T
        state[f"base_model.model.{path}.lora_B.default.weight"] = np.asarray(pair.b).T
    return state


def logprobs_of(model, prompt: list[int], completion: list[int]) -> np.ndarray:
    """The logprob of each token of the completion, by one forward pass of mlx-lm's own model."""
    logits = model(mx.array([[*prompt, *completion]]))[0, len(prompt) - 1 : -1].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(logprobs, mx.array(completion)[:, None], axis=-1))[:, 0]


def version(engine: RetrainEngine) -> int:
    live = engine._host.served.adapters.live(ADAPTER)
    return live.version if live else 0


def check(engine: RetrainEngine, model, temperature: float = 1.0, top_p: float = 1.0) -> list[list[list[int]]]:
    """Draws with `engine`, and compares its logprobs with those of `model`. Returns the tokens."""
    groups = engine.generate(PROMPTS, 3, 6, temperature, top_p)
    assert [len(group) for group in groups] == [3, 3]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for result in group:
            assert len(result.token_ids) == 6 or result.token_ids[-1] == EOS
            own = logprobs_of(model, prompt, result.token_ids)
            np.testing.assert_allclose(result.logprobs, own, atol=1e-4)
            assert result.token_entropies is None
    return [[result.token_ids for result in group] for group in groups]


def test_the_contract(engine: RetrainEngine, tmp_path: Path) -> None:
    base = tiny_model("llama")
    first = check(engine, base)
    assert len({tuple(ids) for ids in first[0]}) > 1, "the samples of a prompt differ"
    check(engine, base, temperature=0.7, top_p=0.8)

    one, two = (random_adapter(layout(), seed) for seed in (1, 2))
    engine.sync_from_state_dict(state_dict_of(one))
    check(engine, merged(tiny_model("llama"), one))
    assert version(engine) == 1
    engine.sync_from_state_dict(state_dict_of(one))
    assert version(engine) == 1, "the same weights are not synced again"

    folder = tmp_path / "_live_adapter"
    write_peft(folder, two, layout(), None)
    engine.reload_weights(str(folder))
    check(engine, merged(tiny_model("llama"), two))
    assert version(engine) == 2
    engine.reload_weights(str(folder))
    assert version(engine) == 2, "the files are the same"
    write_peft(folder, one, layout(), None)  # as retrain's helper does: each step into the same folder
    engine.reload_weights(str(folder))
    assert version(engine) == 3
    check(engine, merged(tiny_model("llama"), one))


def test_weights_are_copied_when_they_are_synced(engine: RetrainEngine) -> None:
    weights = random_adapter(layout(), 3)
    state = state_dict_of(weights)
    copies = {name: np.array(value) for name, value in state.items()}
    engine.sync_from_state_dict(copies)
    for value in copies.values():
        value[:] = 0  # the trainer goes on
    check(engine, merged(tiny_model("llama"), weights))


def test_what_does_not_fit_is_refused_and_changes_nothing(engine: RetrainEngine, tmp_path: Path) -> None:
    engine.generate(PROMPTS, 1, 1, 1.0, 1.0)  # which starts it
    before = version(engine)
    state = state_dict_of(random_adapter(layout(), 4))
    name = next(name for name in state if "lora_A" in name)
    with pytest.raises(AdapterFileError):
        engine.sync_from_state_dict({**state, name: np.ones((4, 7), np.float32)})
    with pytest.raises(AdapterFileError):
        engine.sync_from_state_dict({})
    with pytest.raises(AdapterFileError):
        engine.reload_weights(tmp_path)
    assert version(engine) == before
    for arguments in (([[]], 1, 1), ([[9999]], 1, 1), ([[-1]], 1, 1), (PROMPTS, 0, 1), (PROMPTS, 1, 0)):
        with pytest.raises(InvalidRequestError):
            engine.generate(*arguments, 1.0, 1.0)
    with pytest.raises(ContextLengthError):
        engine.generate(PROMPTS, 1, 10**6, 1.0, 1.0)
    with pytest.raises(InvalidRequestError, match="entropies"):
        engine.generate(PROMPTS, 1, 1, 1.0, 1.0, compute_entropy=True)
    assert engine.generate([], 2, 2, 1.0, 1.0) == []


def test_equal_seeds_draw_equal_samples(engine: RetrainEngine, model: Path) -> None:
    drawn = []
    for seed in (5, 5, 6):
        other = RetrainEngine(model, seed=seed, server__kv_cache_memory="16MB")
        drawn.append([[r.token_ids for r in group] for group in other.generate(PROMPTS * 2, 2, 6, 1.0, 1.0)])
        other.shutdown()
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][:2] != drawn[0][2:], "a prompt that comes twice gets other samples"


TOML = """
[model]
model = "MODEL"
lora_rank = 4

[training]
seed = 7
max_tokens = 10

[lora]
alpha = 8

[inference]
engine = "pytorch"
url = ""
dtype = "auto"
prefix_caching = false
"""


def test_the_configuration_file_of_retrain(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML.replace("MODEL", str(model)))
    made = RetrainEngine.from_toml(file)
    weights = random_adapter(layout(), 1)
    try:
        made.sync_from_state_dict(state_dict_of(weights))
        check(made, merged(tiny_model("llama"), weights))
        with pytest.raises(AdapterFileError, match="max-lora-rank 4"):
            made.sync_from_state_dict(state_dict_of(random_adapter(layout(), 1, rank=8)))
    finally:
        made.shutdown()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            '"pytorch"',
            '"pytorch"\nkv_cache_dtype = "fp8"',
            "kv_cache_dtype: 'fp8' is not available here; give one of auto",
        ),
        ('"pytorch"', '"pytorch"\nattention_kernel = "triton"', "attention_kernel: 'triton' is not available here"),
        ('"pytorch"', '"max"', "retrain runs MAX in its own process"),
        ('"pytorch"\nurl = ""', '"vllm"\nurl = "http://localhost:8000"', "vllm is a server of its own"),
        ('"pytorch"', '"vllm"', "needs the address of its server"),
        ('"pytorch"', '"tensorrt"', "inference.engine"),
        ('dtype = "auto"', "dtpe = 1", "unknown key"),
        ("lora_rank = 4", 'lora_rank = "4"', "lora_rank: must be int"),
        ("[lora]", "[lora", "not valid TOML"),
        ("[lora]", "deep = " + "[" * 2000, "not valid TOML"),
    ],
)
def test_what_a_configuration_file_may_not_say(model: Path, tmp_path: Path, old: str, new: str, reason: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML.replace("MODEL", str(model)).replace(old, new))
    with pytest.raises(ConfigError, match=reason):
        RetrainEngine.from_toml(file)


@pytest.mark.parametrize("dtype", ["dtype", "kv_cache_dtype"])
def test_a_type_of_numbers_that_the_model_has_not_is_refused(model: Path, tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "run.toml"
    for value, fits in (("fp32", True), ("bfloat16", False)):
        file.write_text(TOML.replace("MODEL", str(model)).replace('dtype = "auto"', f'{dtype} = "{value}"'))
        made = RetrainEngine.from_toml(file)
        with nullcontext() if fits else pytest.raises(ConfigError, match="the model is held in float32 here"):
            made.generate(PROMPTS, 1, 1, 1.0, 1.0)
        made.shutdown()


def test_quantized_keys_and_the_kernel_of_attention(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    keys = 'kv_cache_dtype = "int8"\nattention_kernel = "sdpa"'
    file.write_text(TOML.replace("MODEL", str(model)).replace('dtype = "auto"', keys))
    settings = RetrainEngine.from_toml(file)._config.server
    assert (settings.kv_bits, settings.attention) == (8, "plain")


def test_without_an_engine_a_sample_is_refused(model: Path) -> None:
    made = RetrainEngine(model, inference__engine="none")
    with pytest.raises(ConfigError, match="none samples nothing"):
        made.generate(PROMPTS, 1, 1, 1.0, 1.0)
    made.shutdown()


_FORGETS = """
import sys
from mlx_parallm import RetrainEngine
engine = RetrainEngine(sys.argv[1], server__kv_cache_memory="16MB")
print(len(engine.generate([[1, 2, 3]], 2, 3, 1.0, 1.0)[0]))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_that_forgets_to_shut_it_down_ends_all_the_same(model: Path) -> None:
    """MLX would abort a process whose device thread still runs at its end."""
    command = [sys.executable, "-c", _FORGETS, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
