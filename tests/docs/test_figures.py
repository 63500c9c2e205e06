"""The figures of the README, and the table of what fits, are those of the records."""

import json
from typing import Any

from docs.pages import ROOT, lines_of, table_of

from benchmarks.lib.families import HEADERS, Family, page_table

RECORDS = ROOT / "benchmarks" / "results"


def test_figures_of_the_readme() -> None:
    serving, adapters, both = _figures("serving"), _figures("adapters"), _figures("serve_and_train")
    learning, turns, worst = _figures("learning"), _figures("prefix"), _figures("prefix", "high")
    second = [f"second turn against {other}, worst" for other in ("our first turn", "mlx_lm.server")]
    ratios = [serving[f"throughput against mlx_lm.server, {clients} clients"] for clients in (1, 8, 16, 32)]
    first, other = (
        f"{turns[name]:.2f}x of {of} ({worst[name]:.2f}x)"
        for name, of in zip(second, ("turn 1", "`mlx_lm.server`"), strict=True)
    )
    expected = [
        f"{', '.join(f'{ratio:.2f}x' for ratio in ratios)} of `mlx_lm.server`",
        f"{serving['median first token against mlx_lm.server, 16 clients']:.2f}x of `mlx_lm.server`",
        f"{first}, {other}",
        f"{adapters['served with 8 adapters against none, 16 clients']:.2f}x of no adapters",
        f"{adapters['publish: until a row has it']:.2f} s",
        *(
            f"{both[f'{mode}: updates a minute']:.1f} updates/min, "
            f"clients keep {both[f'{mode}: throughput against inference only']:.2f}x throughput"
            for mode in ("RL", "priority")
        ),
        " → ".join(f"{learning[f'sentiment, seed 0: held-out reward {when}']:.2f}" for when in ("before", "after")),
    ]
    assert [figure for _, figure, _ in table_of("README.md", "| what | figure | benchmark |")] == expected


def test_figures_of_the_recipes() -> None:
    """Those of the default model."""
    found = _figures("rl_programs")
    first, second, _ = table_of(
        "README.md", next(each for each in lines_of("README.md") if each.startswith("| recipe |"))
    )
    loss = found["recipe 1: loss of the last update on the file / of the first"]
    ends = [found[f"recipe {number}: reward of update {at}"] for number, last in ((1, 15), (2, 20)) for at in (1, last)]
    assert first[2].startswith(f"the file: loss to {loss:.2f}x; 15 updates: reward {ends[0]:.2f} → {ends[1]:.2f}")
    assert second[2].startswith(f"20 updates: reward {ends[2]:.2f} → {ends[3]:.2f}")


def test_page_of_models_shows_every_family() -> None:
    """The site puts the table in the place of the comment; see scripts/families_table.py."""
    assert "<!-- families -->" in lines_of("docs/models.md")
    families = [Family(**each) for each in _record("families")["families"]]
    header, _, *rows = (line.strip("| ").split(" | ") for line in page_table(families).splitlines())
    assert (header, {len(row) for row in rows}) == ([*HEADERS], {len(HEADERS)})
    assert [row[0] for row in rows] == [each.name for each in families]


def test_table_of_what_fits() -> None:
    releases = _record("fits")["releases"]
    header = next(line for line in lines_of("docs/models.md") if line.startswith("| release |"))
    for name, family, *cells in table_of("docs/models.md", header):
        mine = [each for each in releases if (each["base"], each["family"]) == (name, family)]
        sizes = (f"{mine[0][size] / 1e9:.1f} GB" for size in ("policy", "micro_step"))
        machines = (
            f"{each['alone']}; " + (f"{each['rows']} ({each['longest']:,})" if each["rows"] else "–") for each in mine
        )
        first = mine[0]
        assert cells == [f"{first['weights'] / 1e9:.1f} GB", f"{first['row'] / 1e6:,.0f} MB", *sizes, *machines]


def _figures(record: str, which: str = "median") -> dict[str, Any]:
    """Medians, or the lowest or highest values, by name."""
    return {figure["name"]: figure["value"][which] for figure in _record(record)["figures"]}


def _record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text())
