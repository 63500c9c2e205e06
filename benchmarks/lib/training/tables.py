"""The two published tables: the cost of training for served requests, and its memory."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from benchmarks.lib.figures import spread
from benchmarks.lib.report import console
from benchmarks.lib.training.memory import ADAPTERS, SERVING, TRAINER, TRAINING, Held, Memory
from benchmarks.lib.training.served import KINDS, Served, Window

COLUMNS: dict[str, tuple[Callable[[Window], float], int]] = {
    "tokens/s": (lambda window: window.rate, 1),
    "between tokens, ms": (lambda window: 1e3 * window.gap_s, 0),
    "99 % of tokens within, ms": (lambda window: 1e3 * window.gap_99_s, 0),
    "99 % of first tokens within, ms": (lambda window: 1e3 * window.first_99_s, 0),
    "longest wait for a token, ms": (lambda window: 1e3 * window.longest_gap_s, 0),
    "updates/min": (lambda window: window.updates_per_minute, 1),
    "training, % of time": (lambda window: 100 * window.share, 1),
}


def show(served: Served | None, memories: Sequence[Memory]) -> None:
    if served:
        console().print(_serving(served))
    if memories:
        console().print(_memory(memories))


def _serving(served: Served) -> Table:
    table = Table("", title="8 clients stream, median (least–most) of the windows")
    for header in COLUMNS:
        table.add_column(header, justify="right")
    for kind in KINDS:
        windows = served.of(kind)
        table.add_row(kind, *(spread(map(read, windows)).text(digits) for read, digits in COLUMNS.values()))
    return table


def _memory(memories: Sequence[Memory]) -> Table:
    table = Table("model", "", title="Memory that MLX holds")
    for header in ("active, MB", "peak, MB"):
        table.add_column(header, justify="right")
    for memory in memories:
        for held in _rows(memory):
            table.add_row(memory.model, held.name, *(f"{count / 1e6:.0f}" for count in (held.active, held.peak)))
        table.add_section()
    return table


def _rows(memory: Memory) -> Iterator[Held]:
    for kind in (SERVING, ADAPTERS, TRAINING, TRAINER):
        if kind in memory.held:
            yield memory.held[kind]
    active = memory.held[SERVING].active + memory.held[TRAINER].active
    yield Held(f"{SERVING}, and {TRAINER}", active, memory.apart)
