"""`mlx_parallm check MODEL`: what a model can do here."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlx_parallm.cli.parser import Parser
from mlx_parallm.cli.table import add_json_argument, show, table

if TYPE_CHECKING:
    from mlx_parallm.engine.model_check import ModelVerdict


def add_arguments(parser: Parser) -> None:
    """Adds the arguments of `check`."""
    parser.add_argument("model", metavar="DIR_OR_HUB_ID", nargs="?", help="The model. Default: the bundled one.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run Python code that comes with the model.")
    parser.add_argument("--row-by-row", action="store_true", help="Run each row alone, which is slow and always right.")
    add_json_argument(parser)
    parser.set_defaults(run=check)


def check(args: Namespace) -> int:
    """Prints what was found. The exit status is 0 if all checks passed, else 1."""
    from mlx_parallm.engine.model_check import check_model

    verdict = check_model(args.model, args.trust_remote_code, args.row_by_row)
    show(args, asdict(verdict), lambda: "\n".join(_lines(verdict)))
    return int(any(each.problem for each in verdict.findings))


def _lines(verdict: ModelVerdict) -> Iterator[str]:
    yield f"family   {verdict.family}; layers checked: {verdict.layers}"
    yield f"runs     {'row by row (compatible)' if verdict.compatible else 'batched'}"
    yield f"in parts {', '.join(verdict.in_parts) or 'nothing'}"
    rows = (
        (each.check, "-" if each.error is None else f"{each.error:.1e}", each.problem or "passed")
        for each in verdict.findings
    )
    yield table([("check", "largest error", "result"), *rows])
