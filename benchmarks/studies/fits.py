"""Computes which base models can be served and trained on Macs of 16, 32 and 64 GB, and checks the accounting.

    python benchmarks/studies/fits.py [--only table measured releases] [--models NAME ...] [--out FILE]

`table`: rows of 2,048 and 8,192 tokens beside one policy in training, and the longest sample that can be trained on
beside them, by the accounting that the server uses. `releases`: the same of released models, and the rows that fit
beside their weights without training. They are built without weights, and nothing is run. `measured`: peaks of
micro-steps of the bundled model, of tiny models of other kinds and of released models in their true widths, with
weights of 16 and 4 bits, beside what the accounting expects; the last take up to 8 GB and half an hour, and --models
leaves out others. It prints tables and writes JSON, in which what is left out keeps its values.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training import accounting
from benchmarks.lib.training.accounting import BUNDLED, KINDS, MAC_SHARE, RANK, ROWS, SLOTS, TRUE
from benchmarks.lib.training.releases import BASES, RELEASES

PARTS = ("table", "measured", "releases")
CONTEXTS = (2048, 8192)
LEAST, MOST = 0.7, 1.0
"""Bounds of a measured peak relative to the expected one."""


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    record: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    record |= {"machine": machine.describe(), "facts": {"rank": RANK, "slots": SLOTS, "rows": ROWS}}
    for part, bases, contexts in (("table", BASES, CONTEXTS), ("releases", RELEASES, CONTEXTS[-1:])):
        if part in arguments.only:
            record[part] = alone(accounting.accounts, bases, contexts)
    cases = [(name, None) for name in (BUNDLED, *KINDS)] + [(name, bits) for name in TRUE for bits in (16, 4)]
    for name, bits in cases if "measured" in arguments.only else ():
        if name in arguments.models:
            peaks = alone(accounting.measured, name, bits)
            others = [each for each in record.get("measured", []) if each["model"] != peaks[0]["model"]]
            report.write(arguments.out, record | {"measured": [*others, *peaks]}, [])
            record["measured"] = [*others, *peaks]
    figures = [*_of_peaks(record.get("measured", []))]
    report.show(figures, *(_table(part, record[part]) for part in ("table", "releases") if part in record))
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _of_peaks(peaks: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    for kind, checkpointed in (("layers checkpointed", True), ("activations kept", False)):
        ratios = [each["measured"] / each["expected"] for each in peaks if each["checkpointed"] == checkpointed]
        if ratios:
            spread, _ = reported(ratios)
            yield Figure(f"peak of a micro-step over the expected one, {kind}", "x", spread, max(ratios), MOST)
            yield Figure(f"the lowest of these, {kind}", "x", spread, min(ratios), LEAST, at_least=True)


def _table(title: str, accounts: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each base and context. In the columns of machines: rows without training; rows beside a policy in
    training, at most ROWS, and tokens of the longest sample."""
    table = Table("base", "context", title=title)
    for header in ("adapter", "weights", "KV a row", "policy", "micro-step", *(f"{size} GB" for size in MAC_SHARE)):
        table.add_column(header, justify="right")
    for base, context in dict.fromkeys((each["base"], each["context"]) for each in accounts):
        mine = [each for each in accounts if (each["base"], each["context"]) == (base, context)]
        sizes = (f"{mine[0][name] / 1e9:.2f} GB" for name in ("weights", "row", "policy", "micro_step"))
        rows = (
            f"{each['alone']}; " + (f"{each['rows']}, {each['longest']:,}" if each["rows"] else "–") for each in mine
        )
        table.add_row(base, f"{context:,}", f"{mine[0]['adapter'] / 1e6:.1f} MB", *sizes, *rows)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", default=[BUNDLED, *KINDS, *TRUE], metavar="NAME")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "fits.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
