"""The shared nouns. A leaf: imports nothing of ours, no MLX, no HTTP.

Everything here is frozen and crosses room walls freely: the HTTP face builds a `GenerationRequest`,
the engine answers it with a stream of events, and neither knows how the other works.
"""

from mlx_parallm.core.adapters import (
    BASE_ADAPTER,
    AdapterCard,
    AdapterRef,
    AdapterStats,
    CheckpointCard,
    Residence,
)
from mlx_parallm.core.clients import (
    AdapterClient,
    DeviceWork,
    EngineClient,
    EngineStats,
    ModelCard,
    TextTokenizer,
)
from mlx_parallm.core.requests import (
    Event,
    FinishReason,
    GenerationRequest,
    PromptScored,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
    TokenLogprob,
    WorkClass,
)

__all__ = [
    "BASE_ADAPTER",
    "AdapterCard",
    "AdapterClient",
    "AdapterRef",
    "AdapterStats",
    "CheckpointCard",
    "DeviceWork",
    "EngineClient",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerationRequest",
    "ModelCard",
    "PromptScored",
    "RequestFailed",
    "RequestFinished",
    "Residence",
    "SamplingParams",
    "SequenceOutput",
    "StopParams",
    "TextTokenizer",
    "TokenLogprob",
    "WorkClass",
]
