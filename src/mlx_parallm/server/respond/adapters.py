"""Cards of adapters and checkpoints, worded for the wire."""

from __future__ import annotations

import math

from mlx_parallm.core import AdapterCard, CheckpointCard
from mlx_parallm.server.wire.adapters import Adapter, Checkpoint, LoadedLora


def adapter_object(card: AdapterCard) -> Adapter:
    return Adapter(
        id=str(card.ref),
        name=card.ref.name,
        version=card.ref.version,
        live=card.live,
        residence=card.residence.value,
        root=card.root,
        rank=card.rank,
        alpha=card.alpha,
        targets=list(card.targets),
        bytes=card.bytes,
        created=card.created,
        leases=card.leases,
        checkpoint=card.checkpoint,
    )


def loaded_object(card: AdapterCard) -> LoadedLora:
    said = adapter_object(card).model_dump()
    return LoadedLora(**said, status="success", lora_name=card.ref.name, lora_adapter=str(card.ref))


def checkpoint_object(card: CheckpointCard) -> Checkpoint:
    """Without its path, which is the server's own affair."""
    return Checkpoint(
        name=card.name,
        lora_adapter=str(card.adapter),
        step=card.step,
        created=card.created,
        tags=list(card.tags),
        metrics={name: value if math.isfinite(value) else None for name, value in card.metrics.items()},
    )
