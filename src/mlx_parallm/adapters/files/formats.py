"""What a format must say of itself, and which one a config is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from mlx_parallm.adapters.files.disk import CONFIG_FILE, problem
from mlx_parallm.adapters.files.mlx_lm import MlxLmFormat
from mlx_parallm.adapters.files.peft import PeftFormat

FormatName = Literal["mlx-lm", "peft"]
Factor = Literal["a", "b"]


class Format(Protocol):
    """One adapter's config, understood. `transposed`: stored a is [rank, in] and b [out, rank]."""

    @property
    def name(self) -> FormatName: ...

    @property
    def weights_file(self) -> str: ...

    @property
    def transposed(self) -> bool: ...

    def factor(self, tensor: str) -> tuple[str, Factor]:
        """The module path in a tensor's name, and which factor it is.

        Raises:
            AdapterFileError: it is no factor of a LoRA pair.
        """
        ...

    def declared(self, path: str) -> tuple[int, float]:
        """Rank and scale of a module, by the config."""
        ...


def format_of(config: Mapping[str, Any]) -> Format:
    """Raises AdapterFileError: the config is of neither format, or asks for what is not supported."""
    is_peft = "peft_type" in config
    is_mlx_lm = "fine_tune_type" in config or "lora_parameters" in config
    if is_peft and is_mlx_lm:
        raise problem(f"{CONFIG_FILE} has keys of both formats, PEFT's peft_type and mlx-lm's: keep those of one")
    if is_peft:
        return PeftFormat(config)
    if is_mlx_lm:
        return MlxLmFormat(config)
    raise problem(f"{CONFIG_FILE} has neither peft_type (PEFT) nor lora_parameters (mlx-lm): what wrote it?")
