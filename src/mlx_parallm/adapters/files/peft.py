"""PEFT's LoRA adapters: `base_model.model.<path>.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank].

Keys of the config are those of `LoraConfig` (https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from mlx_parallm.adapters.files.disk import CONFIG_FILE, problem
from mlx_parallm.adapters.files.fields import described, number_of, rank_of
from mlx_parallm.adapters.files.patterns import Patterns
from mlx_parallm.adapters.names import shown

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

_USED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_CHECKED = frozenset({"bias", "init_lora_weights"})
_WITHOUT_EFFECT = frozenset(
    {
        # Where the adapter came from, and how it was trained.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"),
        *("task_type", "eva_config", "loftq_config", "corda_config", "lora_ga_config", "velora_config"),
        *("megatron_config", "megatron_core", "merge_weights", "runtime_config"),
        # Which modules have factors: the tensors say so themselves.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
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
    "target_parameters": "LoRA on parameters (target_parameters), as of experts,",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# These starts also change the base's weights, and the adapter only fits the changed ones.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

_FACTOR = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])(?:\.default)?\.weight", re.DOTALL)
_TENSOR_KINDS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_A": "embedding LoRA",
    "lora_embedding_B": "embedding LoRA",
    "modules_to_save": "training whole modules (modules_to_save)",
    "token_adapter": "training of token embeddings (trainable_token_indices)",
    "bias": "a trained bias",
}


class PeftFormat:
    """Raises AdapterFileError: the config asks for what is not supported, or is malformed."""

    name: Literal["peft"] = "peft"
    weights_file = WEIGHTS_FILE
    transposed = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse_unsupported(config)
        self._rank = rank_of(config.get("r"), "r")
        self._alpha = number_of(config.get("lora_alpha"), "lora_alpha")
        self._rslora = config.get("use_rslora") or False
        if not isinstance(self._rslora, bool):
            raise problem(f"{CONFIG_FILE}: use_rslora must be true or false, got {described(self._rslora)}")
        self._ranks = Patterns("rank_pattern", config.get("rank_pattern"), rank_of)
        self._alphas = Patterns("alpha_pattern", config.get("alpha_pattern"), number_of)

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
        return rank, alpha / (math.sqrt(rank) if self._rslora else rank)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    kind = config["peft_type"]
    if kind != "LORA":
        raise problem(f"{CONFIG_FILE}: only peft_type LORA is supported, got {described(kind)}")
    if config.get("bias", "none") != "none":
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
