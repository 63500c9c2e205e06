"""Computes which base models can be served and trained on Macs of 16, 32 and 64 GB, and checks the accounting.

    python benchmarks/fits.py [--only table measured releases] [--out FILE]

`table`: rows of 2,048 and 8,192 tokens beside one policy in training, and the longest sample that can be trained on
beside them, by the accounting that the server uses. Nothing is run for it. `measured`: peaks of micro-steps of the
bundled model, beside what the accounting expects. It takes a minute on two cores, prints tables and writes JSON, in
which a part that --only leaves out keeps its values. `releases`: rows of released models that fit beside weights of
4 bits, without training, by their published widths.
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
from lib.training.releases import RELEASES, fit
from rich.table import Table

HERE = Path(__file__).parent
PARTS = ("table", "measured", "releases")
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
    fitting = [fit(release, CONTEXTS[-1]) for release in RELEASES]
    report.show(figures, _table(accounts), _of_releases(fitting))
    record |= {"table": [asdict(each) for each in accounts], "measured": peaks, "releases": fitting}
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


def _of_releases(fitting: Sequence[Mapping[str, Any]]) -> Table:
    title = f"Rows of {CONTEXTS[-1]:,} tokens that fit beside weights of 4 bits"
    table = Table("release", "family", "weights", "a row", *(f"{size} GB" for size in MAC_SHARE), title=title)
    for each in fitting:
        sizes = (f"{each['weights'] / 1e9:.1f} GB", f"{each['row'] / 1e6:,.0f} MB")
        table.add_row(each["name"], each["family"], *sizes, *map(str, each["rows"].values()))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fits.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
