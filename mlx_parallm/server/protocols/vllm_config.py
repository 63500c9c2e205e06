"""The part of vLLM's resolved configuration that clients of `/server_info` read, such as TRL's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mlx_parallm.core import AdapterStats, ModelCard
from mlx_parallm.server.api.fields import WireOutput
from mlx_parallm.server.protocols.trainers import WORLD_SIZE


class LoRALimits(WireOutput):
    """The adapters that can be served."""

    max_lora_rank: int
    """The largest rank of an adapter."""
    max_loras: int
    """Adapter versions that requests in one batch may use."""


class ParallelLayout(WireOutput):
    """The processes that hold the model: one."""

    data_parallel_size: int
    """Copies of the model."""
    tensor_parallel_size: int
    """Processes that share one copy."""


class ServedModel(WireOutput):
    """The base model in vLLM's words."""

    model: str
    """Its name."""
    dtype: str
    """Type of the activations, written as PyTorch does, such as `torch.float32`."""
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""


class VLLMConfig(WireOutput):
    """Facts about this server where clients of vLLM look for them."""

    served_model: Annotated[ServedModel, Field(serialization_alias="model_config")]
    """The base model."""
    lora_config: LoRALimits
    """The limits on adapters."""
    parallel_config: ParallelLayout
    """How many processes hold the model."""
    weight_transfer_config: None
    """Always null: no weights of a whole model are taken."""


def vllm_config(card: ModelCard, adapters: AdapterStats) -> VLLMConfig:
    return VLLMConfig(
        served_model=ServedModel(model=card.name, dtype=f"torch.{card.dtype}", max_model_len=card.context_length),
        lora_config=LoRALimits(max_lora_rank=adapters.max_rank, max_loras=adapters.slots),
        parallel_config=ParallelLayout(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1),
        weight_transfer_config=None,
    )
