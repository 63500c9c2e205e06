"""mlx-lm's adapters: `<path>.lora_a` [in, rank] and `<path>.lora_b` [rank, out], one rank and one scale for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mlx_parallm.adapters.files.disk import CONFIG_FILE, problem
from mlx_parallm.adapters.files.fields import described, number_of, rank_of
from mlx_parallm.adapters.names import shown

WEIGHTS_FILE = "adapters.safetensors"
_KINDS = {"dora": "DoRA", "full": "full fine-tuning"}


class MlxLmFormat:
    """Raises AdapterFileError: another fine_tune_type than lora, or lora_parameters are malformed."""

    name: Literal["mlx-lm"] = "mlx-lm"
    weights_file = WEIGHTS_FILE
    transposed = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("fine_tune_type", "lora")
        if kind != "lora":
            called = _KINDS.get(kind) if isinstance(kind, str) else None
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

    def factor(self, tensor: str) -> tuple[str, Literal["a", "b"]]:
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
