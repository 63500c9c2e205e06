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
    DeviceThread,
    DeviceWork,
    EngineClient,
    EngineStats,
    ModelCard,
    TextTokenizer,
    TrainingWork,
)
from mlx_parallm.core.grammar import Grammar, GrammarCompiler, GrammarKind, GrammarSpec, GrammarState
from mlx_parallm.core.requests import (
    Collection,
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
from mlx_parallm.core.schedule import MODE_SHARES, DeviceSchedule, Histogram
from mlx_parallm.core.training import (
    GivenTrajectory,
    TrainingClient,
    TrainingEvent,
    TrainingStatus,
    Trajectory,
    TrajectoryCard,
    UpdateReport,
)

__all__ = [
    "BASE_ADAPTER",
    "MODE_SHARES",
    "AdapterCard",
    "AdapterClient",
    "AdapterRef",
    "AdapterStats",
    "CheckpointCard",
    "Collection",
    "DeviceSchedule",
    "DeviceThread",
    "DeviceWork",
    "EngineClient",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerationRequest",
    "GivenTrajectory",
    "Grammar",
    "GrammarCompiler",
    "GrammarKind",
    "GrammarSpec",
    "GrammarState",
    "Histogram",
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
    "TrainingClient",
    "TrainingEvent",
    "TrainingStatus",
    "TrainingWork",
    "Trajectory",
    "TrajectoryCard",
    "UpdateReport",
    "WorkClass",
]
