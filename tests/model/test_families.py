import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny import FAMILIES, VOCAB_SIZE, build_model, tiny_config, tiny_model

from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.checks import check_offsets
from mlx_parallm.model.families import family_of


def batched(model, prompts, continuations, _slots, merge):
    """Prefills each row alone, merges the caches, then steps all rows together."""
    rows = [make_prompt_cache(model) for _ in prompts]
    for prompt, caches in zip(prompts, rows, strict=True):
        model(mx.array([prompt]), cache=caches)
    merged = [merge(layer) for layer in zip(*rows, strict=True)]
    steps = [model(mx.array(tokens)[:, None], cache=merged) for tokens in zip(*continuations, strict=True)]
    return mx.concatenate(steps, axis=1)


def keep_offsets(caches):
    return type(caches[0]).merge(caches)


def lose_offsets(caches):
    """What an architecture does that reads one offset for the whole batch."""
    merged = keep_offsets(caches)
    merged.offset = mx.full(merged.offset.shape, merged.offset.max())
    return merged


@pytest.mark.parametrize("family", FAMILIES)
def test_proved_families_pass_the_check_with_mlx_lms_batch_cache(family):
    # mlx-lm's gemma2 aligns a batch's mask wrongly when query heads share keys.
    model = tiny_model(family, **({"num_key_value_heads": 4} if family == "gemma2" else {}))
    assert family_of(model).tested
    check_offsets(model, lambda *rows: batched(model, *rows, keep_offsets), VOCAB_SIZE)


def test_a_lost_offset_is_refused():
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="differ from their solo runs"):
        check_offsets(model, lambda *rows: batched(model, *rows, lose_offsets), VOCAB_SIZE)


def test_a_misaligned_mask_is_refused():
    model = tiny_model("gemma2")
    with pytest.raises(UnsupportedModelError, match=r"cannot run in a batch|differ from their solo runs"):
        check_offsets(model, lambda *rows: batched(model, *rows, keep_offsets), VOCAB_SIZE)


def test_not_a_number_is_refused():
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModelError):
        check_offsets(model, lambda *rows: batched(model, *rows, keep_offsets) * float("nan"), VOCAB_SIZE)


def test_a_batched_forward_that_fails_is_refused():
    def fail(prompts, continuations, slots):
        raise TypeError("offset must be an integer")

    with pytest.raises(UnsupportedModelError, match="offset must be an integer"):
        check_offsets(tiny_model("llama"), fail, VOCAB_SIZE)


def test_another_plain_architecture_is_unproved_and_may_pass():
    model = build_model({**tiny_config("qwen3"), "model_type": "olmo2"})
    assert not family_of(model).tested
    check_offsets(model, lambda *rows: batched(model, *rows, keep_offsets), VOCAB_SIZE)


def test_only_mlx_lms_own_file_of_that_name_is_proved(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "__module__", "custom_model.llama")
    assert not family_of(model).tested
