"""The section `inference`: where a training run samples. The string below a field is its description."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.config.types import ApiKey, Flag, Folder, Number, Section, Text, lower


class EngineKind(StrEnum):
    """The inference engines that a training run can take samples from."""

    SHARED = "shared"
    OPENAI = "openai"
    MLX = "mlx"
    VLLM = "vllm"
    SGLANG = "sglang"
    MAX = "max"
    NONE = "none"

    @property
    def outside(self) -> bool:
        """Whether it is a server of its own."""
        return self not in (EngineKind.SHARED, EngineKind.NONE)


class InferenceConfig(Section):
    """Where mlx_parallm_train samples. A server always answers its requests itself."""

    engine: Annotated[EngineKind, BeforeValidator(lower), Flag("--inference-engine", "NAME")] = EngineKind.SHARED
    """shared samples in this process, with the weights that are trained. openai, mlx (mlx_lm.server), vllm, sglang and
    max sample on a server at url, which gets each new version of the adapter as files. none samples nothing, so asking
    for a sample is an error.
    """
    url: Annotated[Text | None, Flag("--inference-url", "URL")] = None
    """Address of the engine's server, such as http://127.0.0.1:8000."""
    model: Annotated[Text | None, Flag("--inference-model", "NAME")] = None
    """Name of the base model there. null means the first one that the server lists, and for mlx base_model_path."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Secret that is sent to url as a bearer token. null means none. Prefer the environment variable, because flags and
    files are easily seen by others.
    """
    adapter_dir: Annotated[Folder | None, Flag("--inference-adapter-dir", "DIR")] = None
    """Folder in which the engine's server finds the adapter versions, so both processes need the same path to it. null
    means a folder of the run.
    """
    timeout: Number = Field(default=600.0, gt=0)
    """Longest time in seconds that one request to the engine may take."""

    @model_validator(mode="after")
    def _url_fits_the_engine(self) -> Self:
        if not self.engine.outside:
            if self.url is not None:
                raise ValueError(f"url is not read by the engine {self.engine}; choose one with --inference-engine")
            return self
        if self.url is None:
            raise ValueError(f"the engine {self.engine} needs the address of its server; add --inference-url")
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise ValueError("url must begin with http:// or https://, such as http://127.0.0.1:8000")
        return self
