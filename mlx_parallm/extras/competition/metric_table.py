"""The metrics of comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from mlx_parallm.core.readers import EVERYTHING
from mlx_parallm.extras.competition.comparison import ComparisonCard
from mlx_parallm.extras.competition.service import CompetitionService
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.metrics_table import Counter, Gauge, Labels, Table

COMPARISONS: Table[ComparisonCard] = Table(
    ("adapter",),
    Gauge(
        "rl_comparison_running",
        "1 while two versions of the adapter are compared.",
        lambda card: card.verdict == "running",
    ),
    Gauge(
        "rl_comparison_reward_mean",
        "Mean reward of each version in the comparison that runs, or in the last one.",
        lambda card: {
            str(version.version): mean
            for version, mean in ((card.live, card.live_mean), (card.candidate, card.candidate_mean))
            if mean is not None
        },
        by=("version",),
    ),
)
ENDED_COMPARISONS: Table[Mapping[str, int]] = Table(
    ("adapter",),
    Counter("rl_comparisons", "Comparisons ended, by verdict.", lambda by_verdict: by_verdict, by=("verdict",)),
)


def metrics(backend: Backend) -> Iterator[Metric]:
    """Those of each adapter in training. Without training, they have no samples."""
    cards: dict[Labels, ComparisonCard] = {}
    ended: dict[Labels, Mapping[str, int]] = {}
    competition: CompetitionService | None = backend.extra("competition")
    if competition is not None and backend.training is not None:
        cards = {(card.adapter,): card for card in competition.cards(EVERYTHING)}
        names = [status.adapter for status in backend.training.statuses(reader=EVERYTHING)]
        ended = {(name,): competition.ended(name) for name in names}
    yield from COMPARISONS.read(cards)
    yield from ENDED_COMPARISONS.read(ended)
