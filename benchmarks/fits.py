"""Computes which base models can be served and trained on Macs of 16, 32 and 64 GB, and checks the accounting.

    python benchmarks/fits.py [--only table measured] [--out FILE]

`table`: rows of 2,048 and 8,192 tokens beside one policy in training, and the longest sample that can be trained on
beside them, by the accounting that the server uses. Nothing is run for it. `measured`: peaks of micro-steps of the
bundled model, beside what the accounting expects. It takes a minute on two cores, prints tables and writes JSON, in
which a part that --only leaves out keeps its values.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib import machine, report
from lib.alone import alone
from lib.figures import Figure, reported
from lib.training import accounting
from lib.training.accounting import BASES, MAC_SHARE, RANK, ROWS, SLOTS, Account
from rich.table import Table

HERE = Path(__file__).parent
PARTS = ("table", "measured")
CONTEXTS = (2048, 8192)
LEAST, MOST = 0.6, 1.25
"""Bounds of a measured peak relative to the expected one. It may be much lower: an update of few trained tokens needs
fewer logits."""


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    record: dict[str, Any] = {"machine": machine.describe(), "facts": {"rank": RANK, "slots": SLOTS, "rows": ROWS}}
    accounts = [accounting.account(base, size, context) for base in BASES for context in CONTEXTS for size in MAC_SHARE]
    peaks = alone(accounting.measured) if "measured" in arguments.only else earlier.get("measured", [])
    figures = [*_of_peaks(peaks)]
    report.show(figures, _table(accounts))
    record |= {"table": [asdict(each) for each in accounts], "measured": peaks}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _of_peaks(peaks: Sequence[Mapping[str, float]]) -> Iterator[Figure]:
    for kind, checkpointed in (("layers checkpointed", True), ("activations kept", False)):
        ratios = [each["peak"] / each["expected"] for each in peaks if each["checkpointed"] == checkpointed]
        if ratios:
            spread, _ = reported(ratios)
            yield Figure(f"peak of a micro-step over the expected one, {kind}", "x", spread, max(ratios), MOST)
            yield Figure(f"the lowest of these, {kind}", "x", spread, min(ratios), LEAST, at_least=True)


def _table(accounts: Sequence[Account]) -> Table:
    """A line for each base and context. In the columns of machines: rows, and tokens of the longest sample."""
    title = f"Rows that fit beside a policy in training, at most {ROWS}, and the longest sample"
    table = Table("base", "context", title=title)
    for header in ("adapter", "weights", "KV a row", "policy", "micro-step", *(f"{size} GB" for size in MAC_SHARE)):
        table.add_column(header, justify="right")
    for base in BASES:
        for context in CONTEXTS:
            mine = [each for each in accounts if (each.base, each.context) == (base.name, context)]
            least = mine[0]
            sizes = (least.weights, least.row, least.policy, least.micro_step)
            rows = (f"{each.rows}, {each.longest:,}" if each.rows else "–" for each in mine)
            adapter = f"{least.adapter / 1e6:.1f} MB"
            table.add_row(base.name, f"{context:,}", adapter, *(f"{size / 1e9:.2f} GB" for size in sizes), *rows)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fits.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
