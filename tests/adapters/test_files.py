"""Reading adapters: both formats, and every refusal by name."""

import codecs
import math
from dataclasses import replace

import numpy as np
import pytest
from adapter_folders import (
    DOWN1,
    HEADS,
    HIDDEN,
    KV,
    LAYOUT,
    MLP,
    Q0,
    Q1,
    V0,
    VOCABULARY,
    make_layout,
    mlx_lm_folder,
    mlx_lm_tensors,
    peft_folder,
    peft_tensors,
    read,
    refusal,
)
from safetensors.numpy import save_file

from mlx_parallm.adapters.weights import AdapterLayout

A, B = f"{Q0}.lora_a", f"{Q0}.lora_b"


# ---- mlx-lm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fine_tune_type": "dora"}, "DoRA is not supported"),
        ({"fine_tune_type": "full"}, "full fine-tuning is not supported"),
        ({"fine_tune_type": ["lora"]}, "fine_tune_type must be 'lora'"),
        ({"lora_parameters": {"rank": "4"}}, "lora_parameters.rank must be a whole number"),
        ({"lora_parameters": {"rank": True}}, "lora_parameters.rank must be a whole number"),
        ({"lora_parameters": {"rank": 0}}, "lora_parameters.rank must be a whole number"),
        ({"lora_parameters": {"scale": None}}, "lora_parameters.scale must be a number, got nothing"),
        ({"lora_parameters": {"scale": float("nan")}}, "lora_parameters.scale must be finite"),
        ({"lora_parameters": {"scale": 1e39}}, "lora_parameters.scale must be finite"),
        ({"lora_parameters": {"scale": 10**400}}, "a huge whole number"),
        ({"lora_parameters": {"rank": 5}}, "has rank 4, but the config says 5"),
        ({"peft_type": "LORA"}, "keys of both formats"),
    ],
)
def test_mlx_lm_configs_that_are_refused(changes, words, tmp_path):
    assert words in refusal(mlx_lm_folder(tmp_path, mlx_lm_tensors(), **changes))


KEYS = ["self_attn.q_proj", "mlp.down_proj"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"lora_parameters": {"keys": KEYS}, "num_layers": -1}, ""),
        ({"lora_parameters": {"keys": None}, "num_layers": 0}, ""),
        ({"lora_parameters": {"keys": [*KEYS, "mlp.gate_proj"]}, "num_layers": 99}, ""),
        ({"lora_parameters": {"keys": ["auto"]}}, "keys do not name self_attn.q_proj"),
        ({"lora_parameters": {"keys": KEYS[:1]}}, "keys do not name mlp.down_proj"),
        ({"num_layers": 1}, "num_layers is 1 of 2, but an earlier layer has factors too"),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_warned_of_and_all_tensors_count(changes, told, tmp_path):
    """mlx-lm refuses such folders. Which tensors were trained is in the file of the tensors."""
    tensors = mlx_lm_tensors() | mlx_lm_tensors(path=DOWN1, shape=(MLP, HIDDEN))
    file = read(mlx_lm_folder(tmp_path, tensors, **changes))
    assert list(file.weights.pairs) == [Q0, DOWN1]
    assert told in file.info.warning
    assert bool(file.info.warning) == bool(told)


def test_alpha_without_scale_is_explained(tmp_path):
    mlx_lm_folder(tmp_path, mlx_lm_tensors())
    (tmp_path / "adapter_config.json").write_text('{"lora_parameters": {"rank": 4, "alpha": 8}}')
    assert "give scale, alpha / rank" in refusal(tmp_path)


# ---- PEFT --------------------------------------------------------------------------------------


def test_a_config_that_an_editor_has_marked_as_utf_8_is_read(tmp_path):
    folder = peft_folder(tmp_path, peft_tensors())
    config = folder / "adapter_config.json"
    config.write_bytes(codecs.BOM_UTF8 + config.read_bytes())
    assert read(folder).weights.pairs.keys() == {Q0}


@pytest.mark.parametrize("name", ["", ".default"])
def test_peft_factors_are_transposed_into_ours(name, tmp_path):
    tensors = peft_tensors(rank=4, path=V0, shape=(HIDDEN, KV), name=name)
    pair = read(peft_folder(tmp_path, tensors)).weights.pairs[V0]
    assert pair.scale == 2.0
    assert np.array_equal(pair.a, tensors[f"base_model.model.{V0}.lora_A{name}.weight"].T)
    assert np.array_equal(pair.b, tensors[f"base_model.model.{V0}.lora_B{name}.weight"].T)
    assert all(array.flags.c_contiguous and array.dtype == np.float32 for array in (pair.a, pair.b))


def test_rslora_divides_by_the_root_of_the_rank(tmp_path):
    pair = read(peft_folder(tmp_path, peft_tensors(), use_rslora=True)).weights.pairs[Q0]
    assert pair.scale == pytest.approx(8 / math.sqrt(4))


@pytest.mark.parametrize(
    "ranks",
    [
        {Q1: 8},
        {"layers.1.self_attn.q_proj": 8},
        {r"model\.layers\.1\..*": 8},
        {r".*\.1\.self_attn\.(q|v)_proj": 8, Q1: 3},
        {f"^{Q1}": 8},
    ],
)
def test_patterns_match_whole_tails_of_paths_and_the_first_counts(ranks, tmp_path):
    tensors = peft_tensors(rank=4) | peft_tensors(rank=8, path=Q1)
    alphas = {"1.self_attn.q_proj": 24, "elf_attn.q_proj": 1, "q_pro": 1}
    pairs = read(peft_folder(tmp_path, tensors, rank_pattern=ranks, alpha_pattern=alphas)).weights.pairs
    assert (pairs[Q0].rank, pairs[Q0].scale) == (4, 2.0)
    assert (pairs[Q1].rank, pairs[Q1].scale) == (8, 3.0)


def test_the_pattern_of_a_last_name_means_every_module_of_it(tmp_path):
    tensors = peft_tensors() | peft_tensors(path=Q1)
    pairs = read(peft_folder(tmp_path, tensors, alpha_pattern={"q_proj": 4})).weights.pairs
    assert {pair.scale for pair in pairs.values()} == {1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "ADALORA"}, "only peft_type LORA"),
        ({"peft_type": ["LORA"]}, "only peft_type LORA"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"bias": "all"}, "bias must be 'none'"),
        ({"lora_bias": True}, "a bias on the factors"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer replication"),
        ({"target_parameters": ["experts.down_proj"]}, "such as those of experts"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, "changes the base model too"),
        ({"some_new_option": {"x": 1}}, "'some_new_option' is not known here"),
        ({"r": "4"}, "r must be a whole number"),
        ({"r": 10**400}, "r must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"lora_alpha": -math.inf}, "lora_alpha must be finite"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"rank_pattern": [4]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern.'q_proj' must be a whole number"),
        ({"alpha_pattern": {"q_proj": math.nan}}, "alpha_pattern.'q_proj' must be finite"),
        ({"alpha_pattern": {"(q_proj": 1}}, "no regular expression"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "too complex"),
        ({"alpha_pattern": {"(.|.)(.|.)(.|.)": 1}}, "too complex"),
        ({"alpha_pattern": {".*" * 9: 1}}, "too complex"),
        ({"alpha_pattern": {f".*{i}": 1 for i in range(99)}}, "use plain module names"),
    ],
)
def test_peft_configs_that_are_refused(changes, words, tmp_path):
    assert words in refusal(peft_folder(tmp_path, peft_tensors(), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian", "lora_dropout": 0.9, "task_type": None},
        {"target_modules": "all-linear", "layers_to_transform": [0], "layers_pattern": "layers"},
        {"some_new_option": None, "another": False, "a_third": []},
        {"auto_mapping": {"base_model_class": "X"}, "megatron_core": "y", "rank_pattern": None},
    ],
)
def test_peft_options_without_effect_on_the_result_are_accepted(changes, tmp_path):
    assert read(peft_folder(tmp_path, peft_tensors(), **changes)).weights.pairs[Q0].scale == 2.0


@pytest.mark.parametrize(
    "key", ["bias", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "init_lora_weights"]
)
def test_null_is_a_default(key, tmp_path):
    assert read(peft_folder(tmp_path, peft_tensors(), **{key: None})).weights.rank == 4


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (f"{Q0}.lora_magnitude_vector", "DoRA is not supported"),
        ("model.embed_tokens.lora_embedding_A", "embedding LoRA is not supported"),
        (f"{Q0}.lora_B.bias", "a trained bias is not supported"),
        ("lm_head.modules_to_save.weight", "modules_to_save"),
        (f"{Q0}.lora_C.weight", "is no factor of a LoRA pair"),
    ],
)
def test_peft_tensors_that_are_no_factors(extra, words, tmp_path):
    tensors = peft_tensors() | {f"base_model.model.{extra}": np.zeros((2, 2), np.float32)}
    assert words in refusal(peft_folder(tmp_path, tensors))


# ---- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("theirs", ["model.", "language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_is_found_however_it_is_spelled(ours, theirs, tmp_path):
    layout = make_layout(ours)
    tail = "layers.1.self_attn.q_proj"
    folder = peft_folder(tmp_path, peft_tensors(path=theirs + tail))
    assert list(read(folder, layout).weights.pairs) == [ours + tail]
    folder = peft_folder(tmp_path, peft_tensors(path=HEADS[theirs], shape=(HIDDEN, VOCABULARY)))
    assert list(read(folder, layout).weights.pairs) == [HEADS[ours]]
    folder = peft_folder(tmp_path, peft_tensors(path=theirs + "embed_tokens"))
    assert "embedding LoRA is not supported" in refusal(folder, layout=layout)


def test_the_copy_of_the_head_that_peft_saves_beside_its_factors_is_not_read(tmp_path):
    """Its values do not matter, and it is not counted; its shape must be that of the model's head."""
    tensors = peft_tensors(path="lm_head", shape=(HIDDEN, VOCABULARY))
    copy = {"base_model.model.lm_head.base_layer.weight": np.full((VOCABULARY, HIDDEN), np.nan, np.float16)}
    file = read(peft_folder(tmp_path, tensors | copy))
    assert list(file.weights.pairs) == ["lm_head"]
    assert file.info.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    resized = {name: np.zeros((VOCABULARY + 2, HIDDEN), np.float16) for name in copy}
    assert "or of a resized one" in refusal(peft_folder(tmp_path, tensors | resized))
    assert "holds no tensors of an adapter" in refusal(peft_folder(tmp_path, copy))
    other = {"base_model.model.model.embed_tokens.base_layer.weight": copy.popitem()[1]}
    assert "is no factor of a LoRA pair" in refusal(peft_folder(tmp_path, tensors | other))


EMBEDDING = np.random.default_rng(3).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)


def based_on(folder, tied=False, dtype=np.float32):
    """A layout whose model is in a folder, in two files."""
    folder.mkdir()
    save_file({"model.embed_tokens.weight": EMBEDDING.astype(dtype)}, folder / "model-1.safetensors")
    head = {} if tied else {"lm_head.weight": (EMBEDDING + 1).astype(dtype)}
    save_file({"model.norm.weight": np.ones(HIDDEN, np.float32), **head}, folder / "model-2.safetensors")
    return replace(LAYOUT, source=folder)


@pytest.mark.parametrize("theirs", ["model.", "model.language_model."])
def test_copies_of_the_base_models_embedding_and_head_are_taken(theirs, tmp_path):
    """PEFT saves them if the vocabulary may have been changed, and they change nothing."""
    copies = {
        f"base_model.model.{theirs}embed_tokens.weight": EMBEDDING,
        "base_model.model.lm_head.weight": EMBEDDING + 1,
    }
    folder = peft_folder(tmp_path / "a", peft_tensors() | copies)
    file = read(folder, based_on(tmp_path / "base"))
    assert list(file.weights.pairs) == [Q0]
    assert file.info.nbytes == sum(tensor.nbytes for tensor in peft_tensors().values())
    assert read(folder, based_on(tmp_path / "rounded", dtype=np.float16)).weights.pairs
    tied = peft_folder(tmp_path / "b", peft_tensors() | {"base_model.model.lm_head.weight": EMBEDDING})
    assert read(tied, based_on(tmp_path / "tied", tied=True)).weights.pairs


@pytest.mark.parametrize(
    ("name", "word"), [("model.embed_tokens", "the embedding"), ("lm_head", "the head")], ids=["embedding", "head"]
)
def test_a_copy_that_differs_or_cannot_be_compared_is_refused(name, word, tmp_path):
    layout, tensor = based_on(tmp_path / "base"), f"base_model.model.{name}.weight"
    own = EMBEDDING + (name == "lm_head")
    trained = own.copy()
    trained[7, 3] += 0.1
    for copy in trained, np.zeros((VOCABULARY + 2, HIDDEN), np.float32):
        told = refusal(peft_folder(tmp_path / "a", peft_tensors() | {tensor: copy}), layout=layout)
        assert f"is a copy of {word} that differs from this base model's" in told
        assert "save_embedding_layers=False" in told
    folder = peft_folder(tmp_path / "a", peft_tensors() | {tensor: own})
    packed = replace(LAYOUT, source=tmp_path / "packed")
    packed.source.mkdir()
    save_file({f"{name}.weight": np.zeros((VOCABULARY, 2), np.uint32)}, packed.source / "model.safetensors")
    for other in packed, LAYOUT:
        assert "which cannot be compared with this base model's" in refusal(folder, layout=other)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model.layers.0.mlp.switch_mlp.gate_proj", "expert LoRA is not supported: model.layers.0.mlp.switch_mlp"),
        ("model.layers.1.mlp.experts.3.gate_proj", "expert LoRA is not supported: model.layers.1.mlp.experts.3"),
        ("model.layers.1.mlp.experts.base_layer", "expert LoRA is not supported"),
        ("model.embed_tokens", "embedding LoRA is not supported"),
        ("model.layers.7.self_attn.q_proj", "no such linear: model.layers.7.self_attn.q_proj"),
        ("vision_tower.layers.0.self_attn.q_proj", "no such linear"),
    ],
)
def test_modules_that_adapters_may_not_change(path, words, tmp_path):
    assert words in refusal(peft_folder(tmp_path, peft_tensors(path=path)))
    assert words in refusal(mlx_lm_folder(tmp_path / "mlx-lm", mlx_lm_tensors(path=path)))


def test_a_model_without_adaptable_linears_says_so(tmp_path):
    layout = AdapterLayout({}, {Q0: "LoRA on a gpt2 model"}, 1)
    assert "LoRA on a gpt2 model is not supported" in refusal(peft_folder(tmp_path, peft_tensors()), layout=layout)


def test_two_tensors_of_one_linear_are_refused(tmp_path):
    both = peft_tensors() | peft_tensors(path=f"language_model.{Q0}")
    assert "has two adapters" in refusal(peft_folder(tmp_path, both))
    both = peft_tensors() | peft_tensors(name=".default")
    assert "are the same factor" in refusal(peft_folder(tmp_path, both))


# ---- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({B: None}, "has no lora_b beside it"),
        ({A: None}, "has no lora_a beside it"),
        ({A: np.zeros((HIDDEN + 1, 4), np.float32)}, "maps 16 to 16 features"),
        ({B: np.zeros((4, HIDDEN - 1), np.float32)}, "maps 16 to 16 features"),
        ({B: np.zeros((5, HIDDEN), np.float32)}, "maps 16 to 16 features"),
        ({A: np.zeros(HIDDEN, np.float32)}, "is a matrix"),
        ({A: np.zeros((HIDDEN, 0), np.float32), B: np.zeros((0, HIDDEN), np.float32)}, "is a matrix"),
        ({A: np.zeros((HIDDEN, 4), np.int32)}, "has dtype 'I32'"),
        ({A: np.zeros((HIDDEN, 4), np.float64)}, "store it as F32, F16 or BF16"),
        ({A: np.full((HIDDEN, 4), np.nan, np.float32)}, "not finite"),
        ({B: np.full((4, HIDDEN), np.inf, np.float16)}, "not finite"),
        ({A: None, B: None}, "holds no tensors"),
        ({f"{Q0}.m": np.zeros(HIDDEN, np.float32)}, "DoRA is not supported"),
        ({f"{Q0}.weight": np.zeros((2, 2), np.float32)}, "is no lora_a or lora_b"),
    ],
)
def test_tensors_that_are_refused(change, words, tmp_path):
    merged = mlx_lm_tensors() | change
    tensors = {name: array for name, array in merged.items() if array is not None}
    assert words in refusal(mlx_lm_folder(tmp_path, tensors))


def test_the_rank_is_bounded(tmp_path):
    folder = mlx_lm_folder(tmp_path, mlx_lm_tensors(rank=32), lora_parameters={"rank": 32})
    assert "rank 32 is over --max-lora-rank 16" in refusal(folder)
    assert read(folder, max_rank=32).weights.rank == 32


def test_the_digest_is_of_what_the_weights_are(tmp_path):
    def digest(name, tensors, **changes):
        return read(mlx_lm_folder(tmp_path / name, tensors, **changes)).info.digest

    first = digest("a", mlx_lm_tensors())
    assert first == digest("b", mlx_lm_tensors(), data="other data", iters=7)
    assert first != digest("c", mlx_lm_tensors(), lora_parameters={"scale": 3.0})
    assert first != digest("d", mlx_lm_tensors() | {B: np.zeros((4, HIDDEN), np.float32)})
