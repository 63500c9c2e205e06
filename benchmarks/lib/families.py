"""A row of the table of model families, as a record has it and as the page shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Family:
    """A row of the table. `errors`: by check, None if it failed. `problems`: what went wrong, by check."""

    name: str
    family: str = ""
    compatible: bool = False
    in_parts: tuple[str, ...] = ()
    errors: dict[str, float | None] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    rate: float | None = None
    rate_of_mlx_lm: float | None = None
    speculation: bool = False


HEADERS = (
    *("family", "runs", "in parts", "tokens/s", "mlx-lm", "batch", "adapters", "prefix cache", "gradients"),
    *("speculation", "8-bit KV"),
)


def cells(row: Family) -> list[str]:
    """What the table says of a family."""
    parts = ", ".join(dict.fromkeys(path.rsplit(".", 1)[-1] for path in row.in_parts)) or "-"
    return [
        row.name,
        "compatible" if row.compatible else "batched",
        parts,
        _number(row.rate),
        _number(row.rate_of_mlx_lm),
        *(_error(row, check) for check in ("batch", "adapters", "prefix cache", "gradients")),
        "yes" if row.speculation else "no",
        _error(row, "8-bit keys and values"),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _error(row: Family, check: str) -> str:
    error = row.errors.get(check)
    if error is None:
        return "no" if check in row.problems else "-"
    return f"fails ({error:.0e})" if check in row.problems else f"{error:.0e}"


def page_table(found: Sequence[Family]) -> str:
    """The table as Markdown, for docs/models.md."""
    lines = [HEADERS, ["---"] * len(HEADERS), *map(cells, found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
