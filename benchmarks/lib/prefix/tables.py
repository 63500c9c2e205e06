"""The tables of the prefix cache: every server's times, rates and hit rates."""

from collections.abc import Iterable

from rich.table import Table

from benchmarks.lib.figures import spread
from benchmarks.lib.prefix.replay import Replayed
from benchmarks.lib.prefix.shared import Shared
from benchmarks.lib.prefix.turns import Turns


def turns(results: Iterable[Turns]) -> Table:
    table = _table("First token in seconds, median (least–most) of the histories", "first turn", "second", "other user")
    for side in results:
        table.add_row(side.name, *(spread(values).text(2) for values in (side.first_s, side.second_s, side.other_s)))
    return table


def replay(title: str, results: Iterable[Replayed]) -> Table:
    table = _table(f"{title}, median (least–most) of the repeats", "first tokens, s", "total, s", "hit rate", "longest")
    for side in results:
        rates = spread(side.hit_rates).text(2)
        longest = f"{max(side.longest_prompt)} tokens"
        table.add_row(side.name, spread(side.first_token_s).text(), spread(side.total_s).text(), rates, longest)
    return table


def shared(results: Iterable[Shared]) -> Table:
    table = _table("One prefix, median (least–most) of the repeats", "tok/s", "first token, s", "hit rate", "resets")
    for side in results:
        rates, first = spread(side.rates).text(), spread(side.first_token_s).text(2)
        table.add_row(side.name, rates, first, spread(side.hit_rates).text(2), str(side.resets))
    return table


def _table(title: str, *headers: str) -> Table:
    table = Table("server", title=title)
    for header in headers:
        table.add_column(header, justify="right")
    return table
