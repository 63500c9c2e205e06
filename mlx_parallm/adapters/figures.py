"""What others are shown of the adapters: the card of a version, and the statistics of all."""

from __future__ import annotations

from mlx_parallm.adapters.checkpoints.store import CheckpointStore
from mlx_parallm.adapters.store import AdapterStore
from mlx_parallm.adapters.weights import Version
from mlx_parallm.core import AdapterCard, AdapterStats


def card_of(version: Version, store: AdapterStore) -> AdapterCard:
    info, name = version.info, version.ref.name
    return AdapterCard(
        ref=version.ref,
        live=store.registry.live(name) is version,
        residence=store.residence(version),
        root=info.root,
        rank=info.rank,
        alpha=info.alpha,
        targets=info.targets,
        bytes=info.nbytes,
        created=version.created,
        leases=store.requests(version.ref),
        checkpoint=info.checkpoint,
        warning=info.warning,
    )


def stats_of(store: AdapterStore, checkpoints: CheckpointStore | None) -> AdapterStats:
    """See `core.AdapterClient.stats`. `checkpoints`: None if none are kept."""
    registry, slots = store.registry, store.slots
    running, waiting = store.names()
    return AdapterStats(
        slots=store.bank.slots,
        max_rank=store.bank.max_rank,
        slots_used=len(slots),
        slots_pinned=slots.pinned,
        bank_bytes=store.bytes_held,
        copies=len(store.copies),
        running=running,
        waiting=waiting,
        swaps_total=registry.swaps,
        route_changed=registry.route_changed,
        staged_total=slots.staged,
        evicted_total=slots.evicted,
        checkpoint_saves_total=checkpoints.saves_total if checkpoints else 0,
        flip_s_last=registry.flip_s_last,
        flip_s_max=registry.flip_s_max,
        stage_s_last=slots.stage_seconds,
    )
