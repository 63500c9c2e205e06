"""PEFT's LoRA format: `base_model.model.<path>.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank].

The keys of the config are those of `LoraConfig` (https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Literal, TypeVar

from mlx_parallm.adapters.files.disk import CONFIG_FILE, described, flag_of, number_of, problem, rank_of
from mlx_parallm.adapters.weights import AdapterLayout, lora_scale
from mlx_parallm.errors import shown

Value = TypeVar("Value", int, float)

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


class PeftFormat:
    """The config of a PEFT adapter. Raises AdapterFileError if it is malformed or needs an unsupported feature."""

    name: Literal["peft"] = "peft"
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
        match = _BASE_COPY.fullmatch(tensor)
        return match[1] if match else None

    def factor(self, tensor: str) -> tuple[str, Literal["a", "b"]]:
        match = _FACTOR.fullmatch(tensor)
        if match:
            return match[1], "a" if match[2] == "A" else "b"
        for part in tensor.split("."):
            if part in _TENSOR_KINDS:
                raise problem(f"{_TENSOR_KINDS[part]} is not supported: {shown(tensor)}; train without it")
        raise problem(f"{shown(tensor)} is no factor of a LoRA pair: only {PREFIX}<module>.lora_A.weight and lora_B")

    def declared(self, path: str) -> tuple[int, float]:
        rank = self._ranks.find(path, self._rank)
        alpha = self._alphas.find(path, self._alpha)
        return rank, lora_scale(alpha, rank, self.rslora)

    def contradiction(self, paths: Iterable[str], layout: AdapterLayout) -> str:
        return ""


def is_scorer(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a reward model: an adapter with a head that gives numbers in place of tokens."""
    return config.get("task_type") == SCORER_TASK


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if is_scorer(config):
        raise problem("this is a reward model, which draws no text: name it as the scorer reward_model:NAME")
    kind = config["peft_type"]
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
    for key in sorted(config.keys() - _USED - _CHECKED - _WITHOUT_EFFECT):
        if config[key]:
            raise problem(_refusal(key))


def _refusal(key: str) -> str:
    if key in _REFUSED:
        return f"{CONFIG_FILE}: {_REFUSED[key]} is not supported: train the adapter without {key}"
    return f"{CONFIG_FILE}: {shown(key)} is not known here and may change the result: take it out if it does not"


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
