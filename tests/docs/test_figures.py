"""The figures of the README are those of the records."""

import json
from typing import Any

from docs.pages import ROOT, prose_of

RECORDS = ROOT / "benchmarks" / "results"


def test_figures_of_the_readme() -> None:
    rows = [line for _, line in prose_of("README.md") if line.startswith("|")]
    serving, adapters, both = _figures("serving"), _figures("adapters"), _figures("serve_and_train")
    learning, turns, worst = _figures("learning"), _figures("prefix"), _figures("prefix", "high")
    second = [f"second turn against {other}, worst" for other in ("our first turn", "mlx_lm.server")]
    ratios = [serving[f"throughput against mlx_lm.server, {clients} clients"] for clients in (1, 8, 16, 32)]
    expected = [
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} x",
        f"{', '.join(f'{turns[name]:.2f} ({worst[name]:.2f})' for name in second)} x",
        f"{serving['median first token against mlx_lm.server, 16 clients']:.2f} x",
        f"{adapters['served with 8 adapters against none, 16 clients']:.2f} x",
        f"{both['RL: throughput against inference only']:.2f} x",
        " → ".join(f"{learning[f'sentiment, seed 0: held-out reward {when}']:.2f}" for when in ("before", "after")),
    ]
    assert [row.split("|")[2].strip() for row in rows[2:]] == expected


def _figures(record: str, which: str = "median") -> dict[str, Any]:
    """Medians, or the lowest or highest values, by name."""
    figures = json.loads((RECORDS / f"{record}.json").read_text())["figures"]
    return {figure["name"]: figure["value"][which] for figure in figures}
