"""The two formats of adapters: which tensors are factors of which linears, what their configs say, and how they are
written.

    mlx-lm   adapters.safetensors       `<path>.lora_a` [in, rank], `<path>.lora_b` [rank, out]; one rank and scale.
                                        Those of experts are [experts, rank, in] and [experts, out, rank]
    PEFT     adapter_model.safetensors  `base_model.model.<path>.lora_A.weight` [rank, in], `lora_B.weight` [out, rank]

The keys of PEFT's config are those of `LoraConfig` (https://huggingface.co/docs/peft/package_reference/lora). What is
written is on the disk when a call returns; use `atomic` to make the directory appear whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from mlx_parallm import atomic
from mlx_parallm.adapters.weights import (
    AdapterLayout,
    AdapterWeights,
    Array,
    LinearSpec,
    LoRAPair,
    lora_alpha,
    lora_scale,
)
from mlx_parallm.errors import AdapterFileError, shown

Value = TypeVar("Value", int, float)
FormatName = Literal["mlx-lm", "peft"]
Factor = Literal["a", "b"]

CONFIG_FILE = "adapter_config.json"
MLX_LM_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

SCORE = "score"
"""Transformers' name for the head of a reward model, a linear from hidden states to one number."""
SCORE_WEIGHT = f"{PREFIX}{SCORE}.weight"
SCORER_TASK = "SEQ_CLS"
"""The `task_type` of a reward model."""

_USED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_CHECKED = frozenset({"bias", "init_lora_weights"})
_WITHOUT_EFFECT = frozenset(
    {
        # These say where the adapter came from and how it was trained.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"),
        *("task_type", "eva_config", "loftq_config", "corda_config", "lora_ga_config", "velora_config"),
        *("megatron_config", "megatron_core", "merge_weights", "runtime_config"),
        # These say which modules have factors, as the names of the tensors do.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # These matter only together with features that are refused. An adapter for a tied head and embedding together
        # has factors of the embedding, which are refused.
        *("ensure_weight_tying", "qalora_group_size"),
    }
)
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "modules_to_save": "training whole modules (modules_to_save)",
    "fan_in_fan_out": "fan_in_fan_out, of models with transposed weights,",
    "trainable_token_indices": "training of token embeddings (trainable_token_indices)",
    "lora_bias": "a bias on the factors (lora_bias)",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on parameters (target_parameters), such as those of experts,",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# Other kinds of initialization change the base model's weights too, and the adapter fits the changed model only.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

_FACTOR = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])(?:\.default)?\.weight", re.DOTALL)
# With save_embedding_layers, PEFT saves weights of the base model beside the factors: the head below its factors, which
# is not trained, and the whole embedding and head if the vocabulary may have been changed.
FROZEN = ".base_layer."
_BASE_COPY = re.compile(
    re.escape(PREFIX) + r"((?:[^.]+\.){0,3}(?:embed_tokens|lm_head))(?:(?<=lm_head)\.base_layer)?\.weight"
)
_TENSOR_KINDS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_A": "embedding LoRA",
    "lora_embedding_B": "embedding LoRA",
    "modules_to_save": "training whole modules (modules_to_save)",
    "token_adapter": "training of token embeddings (trainable_token_indices)",
    "bias": "a trained bias",
}

# Limits on the regular expressions of rank_pattern and alpha_pattern, because the file is not trusted. Within these
# limits, matching a pattern takes a few thousand backtracking steps at most.
_LONGEST_PATTERN = 256
_MOST_PATTERNS = 4096
_MOST_COMPLEX = 16
_MOST_OPERATORS = {"*+?": 3, "|": 8, "(": 2, "{": 0}
_PLAIN_PATTERN = re.compile(r"[\w.\-^$\\]*", re.ASCII)
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\(\?")

_MLX_LM_KINDS = {"dora": "DoRA", "full": "full fine-tuning"}
_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_RANK = 2**20


def problem(message: str) -> AdapterFileError:
    """The error for a file that cannot be used."""
    return AdapterFileError(message, "lora_path")


def format_of(config: Mapping[str, Any]) -> Format:
    """The format of a config. Raises AdapterFileError if it has neither or both, or needs an unsupported feature."""
    is_peft = "peft_type" in config
    is_mlx_lm = "fine_tune_type" in config or "lora_parameters" in config
    if is_peft and is_mlx_lm:
        raise problem(f"{CONFIG_FILE} has keys of both formats, PEFT's peft_type and mlx-lm's: keep those of one")
    if is_peft:
        return PeftFormat(config)
    if is_mlx_lm:
        return MlxLmFormat(config)
    raise problem(f"{CONFIG_FILE} has neither peft_type (PEFT) nor lora_parameters (mlx-lm): what wrote it?")


@dataclass(frozen=True, slots=True)
class TrainedWith:
    """The settings with which an adapter was made. `targets`: names of its linears; none if the config does not list
    them. `rslora`: whether it is rank-stabilised."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]


def trained_with(config: Mapping[str, Any]) -> TrainedWith:
    """The settings in an adapter's config. Raises AdapterFileError as `format_of` does."""
    form = format_of(config)
    rank, scale = form.declared("")
    named = config.get("target_modules") if form.name == "peft" else config["lora_parameters"].get("keys")
    names = named if isinstance(named, list) else []
    targets = dict.fromkeys(str(name).rpartition(".")[2] for name in names)
    return TrainedWith(rank, lora_alpha(scale, rank, form.rslora), form.rslora, tuple(targets))


class PeftFormat:
    """The config of a PEFT adapter, and the names of its tensors.

    `transposed`: a is stored as [rank, in] and b as [out, rank]. `rslora`: whether the adapter is rank-stabilised.

    Raises:
        AdapterFileError: the config is malformed or needs an unsupported feature.
    """

    name: FormatName = "peft"
    weights_file = PEFT_WEIGHTS
    transposed = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse_unsupported(config)
        self._rank = rank_of(config.get("r"), "r")
        self._alpha = number_of(config.get("lora_alpha"), "lora_alpha")
        self.rslora = flag_of(config.get("use_rslora") or False, "use_rslora")
        self._ranks = Patterns("rank_pattern", config.get("rank_pattern"), rank_of)
        self._alphas = Patterns("alpha_pattern", config.get("alpha_pattern"), number_of)

    def base_copy(self, tensor: str) -> str | None:
        """The module path in the name of a tensor that repeats the base model's weight; None for any other tensor."""
        match = _BASE_COPY.fullmatch(tensor)
        return match[1] if match else None

    def factor(self, tensor: str) -> tuple[str, Factor]:
        """The module path in a tensor's name, and which factor it is.

        Raises:
            AdapterFileError: it is not a factor of a LoRA pair.
        """
        match = _FACTOR.fullmatch(tensor)
        if match:
            return match[1], "a" if match[2] == "A" else "b"
        for part in tensor.split("."):
            if part in _TENSOR_KINDS:
                raise problem(f"{_TENSOR_KINDS[part]} is not supported: {shown(tensor)}; train without it")
        raise problem(f"{shown(tensor)} is no factor of a LoRA pair: only {PREFIX}<module>.lora_A.weight and lora_B")

    def declared(self, path: str) -> tuple[int, float]:
        """Rank and scale of a module, from the config."""
        rank = self._ranks.find(path, self._rank)
        alpha = self._alphas.find(path, self._alpha)
        return rank, lora_scale(alpha, rank, self.rslora)

    def contradiction(self, paths: Iterable[str], layout: AdapterLayout) -> str:
        """How the config contradicts that these linears have factors; "" if it does not. PEFT's does not say."""
        return ""


def is_scorer(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a reward model: an adapter with a head that gives numbers in place of tokens."""
    return config.get("task_type") == SCORER_TASK


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if is_scorer(config):
        raise problem("this is a reward model, which generates no text: name it as the scorer reward_model:NAME")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise problem(f"{CONFIG_FILE}: only peft_type LORA is supported, got {described(kind)}")
    if config.get("bias") not in (None, "none"):
        raise problem(f"{CONFIG_FILE}: a trained bias is not supported: bias must be 'none'")
    start = config.get("init_lora_weights")
    if not any(start is plain or (isinstance(plain, str) and start == plain) for plain in _PLAIN_STARTS):
        raise problem(
            f"{CONFIG_FILE}: init_lora_weights {described(start)} changes the base model too: save the adapter with "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )
    if key := next((key for key in sorted(config.keys() - _USED - _CHECKED - _WITHOUT_EFFECT) if config[key]), None):
        raise problem(
            f"{CONFIG_FILE}: {_REFUSED[key]} is not supported: train the adapter without {key}"
            if key in _REFUSED
            else f"{CONFIG_FILE}: {shown(key)} is not known here and may change the result: take it out if it does not"
        )


class Patterns(Generic[Value]):
    """PEFT's `rank_pattern` or `alpha_pattern`: values by regular expression. A module gets the value of the first
    pattern that matches its path, or the rest of its path after one of the dots.

    Raises:
        AdapterFileError: it is not an object, a value or pattern is malformed, or a pattern is too complex to be safe.
    """

    def __init__(self, key: str, patterns: Any, value_of: Callable[[Any, str], Value]) -> None:
        patterns = patterns or {}
        if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
            raise problem(f"{CONFIG_FILE}: {key} must be an object of at most {_MOST_PATTERNS} patterns")
        if sum(not _PLAIN_PATTERN.fullmatch(text) for text in patterns) > _MOST_COMPLEX:
            raise problem(f"{CONFIG_FILE}: {key} has over {_MOST_COMPLEX} regular expressions: use plain module names")
        self._patterns: list[tuple[re.Pattern[str], Value]] = [
            (_compiled(key, text), value_of(value, f"{key}.{shown(text)}")) for text, value in patterns.items()
        ]

    def find(self, path: str, default: Value) -> Value:
        """The value for a module path as the file spells it, `default` if no pattern matches."""
        return next((value for pattern, value in self._patterns if pattern.match(path)), default)


def _compiled(key: str, text: str) -> re.Pattern[str]:
    too_many = any(sum(map(text.count, characters)) > most for characters, most in _MOST_OPERATORS.items())
    if len(text) > _LONGEST_PATTERN or too_many or _REPEATED_GROUP.search(text):
        raise problem(f"{CONFIG_FILE}: the pattern {shown(text)} of {key} is too complex: use plain module names")
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise problem(f"{CONFIG_FILE}: the pattern {shown(text)} of {key} is no regular expression: {error}") from error


class MlxLmFormat:
    """The config of an mlx-lm adapter, and the names of its tensors. Its methods are those of `PeftFormat`.

    Raises:
        AdapterFileError: `fine_tune_type` is not lora, or `lora_parameters` are malformed.
    """

    name: FormatName = "mlx-lm"
    weights_file = MLX_LM_WEIGHTS
    transposed = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("fine_tune_type", "lora")
        if kind != "lora":
            called = _MLX_LM_KINDS.get(kind) if isinstance(kind, str) else None
            raise problem(
                f"{CONFIG_FILE}: {called or 'this kind of adapter'} is not supported: "
                f"fine_tune_type must be 'lora', got {described(kind)}"
            )
        parameters = config.get("lora_parameters")
        if not isinstance(parameters, dict):
            raise problem(f"{CONFIG_FILE}: lora_parameters must be an object with rank and scale")
        if "scale" not in parameters and "alpha" in parameters:
            raise problem(f"{CONFIG_FILE}: lora_parameters has alpha but no scale: give scale, alpha / rank")
        self._rank = rank_of(parameters.get("rank"), "lora_parameters.rank")
        self._scale = number_of(parameters.get("scale"), "lora_parameters.scale")
        self.rslora = flag_of(parameters.get("use_rslora") or False, "lora_parameters.use_rslora")
        self._keys, self._layers = parameters.get("keys"), config.get("num_layers")

    def base_copy(self, tensor: str) -> None:
        """mlx-lm saves no copies."""

    def factor(self, tensor: str) -> tuple[str, Factor]:
        path, _, part = tensor.rpartition(".")
        if part == "lora_a":
            return path, "a"
        if part == "lora_b":
            return path, "b"
        if part == "m":
            raise problem(f"DoRA is not supported: {shown(tensor)} is its magnitude; train with fine_tune_type lora")
        raise problem(f"{shown(tensor)} is no lora_a or lora_b: only LoRA factors are supported")

    def declared(self, path: str) -> tuple[int, float]:
        return self._rank, self._scale

    def contradiction(self, paths: Iterable[str], layout: AdapterLayout) -> str:
        """mlx-lm makes the linears of `keys` in the last `num_layers` blocks; with 0 or less, in all. The tensors were
        trained, so all of them count."""
        blocks = [(index, key) for index, key in map(block_of, paths) if index is not None]
        if isinstance(self._keys, list) and (other := next((key for _, key in blocks if key not in self._keys), None)):
            fault = f"keys do not name {other}"
        elif type(self._layers) is int and any(0 < self._layers < layout.layers - index for index, _ in blocks):
            fault = f"num_layers is {self._layers} of {layout.layers}, but an earlier layer has factors too"
        else:
            return ""
        return f"{CONFIG_FILE} contradicts {self.weights_file}: {fault}. All factors are used; correct the config"


Format = PeftFormat | MlxLmFormat

_TEXT, _HEAD = "language_model", "lm_head"
_EXPERTS = re.compile(r"(^|\.)(experts|switch_mlp)(\.|$)")
_REFUSED_KINDS = {"embed_tokens": "embedding LoRA"}


def locate(path: str, layout: AdapterLayout) -> Sequence[LinearSpec]:
    """The model's linears that a path in a file names, in any of the spellings in use; see `AdapterLayout.spelled`.

    Raises:
        AdapterFileError: the model has no such linear, or adapters may not change that module.
    """
    if specs := layout.spelled(path):
        return specs
    if kind := _refusal(path, layout):
        raise problem(f"{kind} is not supported: {shown(path)[1:-1]}; train the adapter without it")
    raise problem(f"the model has no such linear: {shown(path)[1:-1]}; is the adapter of another base model?")


def transformers_path(path: str, layout: AdapterLayout) -> str:
    """Transformers' spelling of a path in the model: the text part of a multimodal model is inside `model`, and its
    head beside that."""
    path = layout.transformers.get(path, path)
    if path == f"{_TEXT}.{_HEAD}":
        return _HEAD
    inner = path.removeprefix(f"{_TEXT}.model.")
    return path if inner == path else f"model.{_TEXT}.{inner}"


def _refusal(path: str, layout: AdapterLayout) -> str:
    if refusal := layout.refusal(path):
        return refusal
    if _EXPERTS.search(path):
        return "expert LoRA in another format than mlx-lm's" if any(spec.experts for spec in layout) else "expert LoRA"
    return _REFUSED_KINDS.get(path.rpartition(".")[2], "")


def block_of(path: str) -> tuple[int | None, str]:
    """The index of a path's transformer block, and the path inside the block, which mlx-lm lists in `keys`."""
    parts = path.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return (None, path) if index is None else (int(parts[index]), ".".join(parts[index + 1 :]))


# -- numbers of the config ------------------------------------------------------------------------


def rank_of(value: Any, key: str) -> int:
    """A rank: a whole number from 1 to 2^20. Later checks compare it with the model's shapes and --max-lora-rank.

    `key`: the full name of the config's key, such as `lora_parameters.rank`, for errors.

    Raises:
        AdapterFileError: it is not a rank.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_RANK:
        raise problem(f"{CONFIG_FILE}: {key} must be a whole number from 1 to {_LARGEST_RANK}, got {described(value)}")
    return value


def number_of(value: Any, key: str) -> float:
    """A number that float32 can hold.

    Raises:
        AdapterFileError: it is not a number, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise problem(f"{CONFIG_FILE}: {key} must be a number, got {described(value)}")
    if not abs(value) <= _LARGEST:
        raise problem(f"{CONFIG_FILE}: {key} must be finite in float32, got {described(value)}")
    return float(value)


def flag_of(value: Any, key: str) -> bool:
    """Raises AdapterFileError unless the value is true or false."""
    if not isinstance(value, bool):
        raise problem(f"{CONFIG_FILE}: {key} must be true or false, got {described(value)}")
    return value


def described(value: Any) -> str:
    """A JSON value for an error message, of limited length."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge whole number"
    return "nothing" if value is None else str(value)


# -- writing ---------------------------------------------------------------------------------------

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
        a, b = _padded(_stored(pair.a), rank, axis=-1), _padded(rescaled(pair, scale), rank, axis=-2)
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
            b[row : row + pair.rank, column : column + spec.out_features] = rescaled(pair, scale)
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


def rescaled(pair: LoRAPair, scale: float) -> Float:
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
