"""The tables of serving: the rates of every side, and its times to the first token."""

from collections.abc import Sequence

from rich.table import Table

from benchmarks.lib.figures import spread
from benchmarks.lib.throughput import Point, Side


def throughput(points: Sequence[Point]) -> Table:
    table = Table(title="Served, median (least–most) of the repeats")
    headers = ("clients", "server", "tok/s", "first token, s", "slowest, s", "answers", "resets", "errors")
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 1 else "right")
    for point in points:
        for side in (point.ours, point.theirs):
            table.add_row(str(point.concurrency), *_cells(side))
    return table


def _cells(side: Side) -> list[str]:
    measured = [
        spread(side.rates).text(),
        spread(side.first_token_s).text(2),
        spread(side.slowest_first_token_s).text(2),
    ]
    return [side.name, *measured, *map(str, (side.requests, side.resets, len(side.errors)))]


def decode(rates: dict[str, list[float]]) -> Table:
    table = Table("side", title="Decode while 16 rows decode, median (least–most) of the repeats")
    table.add_column("tok/s", justify="right")
    for name, values in rates.items():
        table.add_row(name, spread(values).text())
    return table
