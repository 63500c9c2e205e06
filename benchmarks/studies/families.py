"""What every model family of mlx-lm can do here: one table, of tiny random models with float32 weights.

    python benchmarks/studies/families.py [NAME ...] [--out families.json]

Each row: how the model runs, which of its modules run in parts, tokens a second of 8 sequences that decode together
beside mlx-lm's batch generator in turns with it, and the largest relative error of each check, which compare with
mlx-lm's own code: rows of a batch, rows with two adapters and the base model, a row that goes on from a cached prefix,
and gradients of LoRA factors; "no": the model cannot do it here. With quantized keys and values, the error is that of
rounding to 8 bits.

The models take a few milliseconds a step, most of it in Python, so the rates say what a family's path costs beside
mlx-lm's, and nothing about real sizes. docs/models.md shows the record.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx  # isort: skip
import mlx.nn as nn

from benchmarks.lib import machine, report
from benchmarks.lib.families import HEADERS, Family, cells

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import family_checks as checks  # noqa: E402
from harness import make_harness  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402

from mlx_parallm.cli.show import table  # noqa: E402
from mlx_parallm.core.requests import SamplingParams  # noqa: E402
from mlx_parallm.engine.model_check import check_built  # noqa: E402
from mlx_parallm.engine.startup import Prover  # noqa: E402
from mlx_parallm.errors import UnsupportedModelError  # noqa: E402

ROWS, PROMPT, STEPS = 8, 16, 24
REPEATS = 3


def main() -> None:
    arguments = _arguments()
    names = arguments.names or [name for name in checks.CONFIGURATIONS if name not in checks.ELSEWHERE]
    found = []
    for name in names:
        found.append(measured(name))
        print(_line(found[-1]), flush=True)
    print(table([HEADERS, *map(cells, found)]))
    if not arguments.names:
        families = [asdict(each) for each in found]
        arguments.out.write_text(json.dumps({"machine": machine.describe(), "families": families}, indent=1) + "\n")


def measured(name: str) -> Family:
    """All of a row."""
    verdict = check_built(checks.build(name))
    row = Family(name, verdict.family, verdict.compatible, verdict.in_parts)
    row.errors = {each.check: each.error for each in verdict.findings}
    row.problems = {each.check: each.problem for each in verdict.findings if each.problem}
    served = checks.Served(name)
    row.speculation = served.plan.layout.takes_drafts
    row.errors["8-bit keys and values"] = _quantized(served)
    row.rate, row.rate_of_mlx_lm = _rates(name)
    return row


def _quantized(served: checks.Served) -> float | None:
    """The relative error with 8 bits for each number of a full block; None if they are refused."""
    plan = served.plan
    if plan.in_parts & plan.layout.attention.keys():
        return None
    try:
        layout = plan.layout.quantized(8)
    except UnsupportedModelError:
        return None
    return Prover(served.model, served.bank, plan, layout=layout).batch().error


def _rates(name: str) -> tuple[float | None, float | None]:
    """Tokens a second of 8 rows that decode together, here and with mlx-lm's batch generator, in turns: the medians."""
    prompts = [[(7 + 31 * row + 13 * at) % 97 for at in range(PROMPT)] for row in range(ROWS)]
    ours, theirs, served, plain = [], [], checks.build(name), checks.build(name)
    for _ in range(REPEATS):
        ours.append(_ours(served, name in checks.COMPATIBLE, prompts))
        theirs.append(_theirs(plain, prompts))
    both = [statistics.median(each) if None not in each else None for each in (ours, theirs)]
    return both[0], both[1]


def _ours(model: nn.Module, compatible: bool, prompts: list[list[int]]) -> float:
    harness = make_harness(model, compatible=compatible, max_batched_tokens=256)
    for number, prompt in enumerate(prompts):
        harness.submit(str(number), prompt, 4 + STEPS, sampling=SamplingParams(temperature=0.0))
    while not all(harness.tokens(str(number)) for number in range(ROWS)):
        harness.loop.step()
    started, before = time.perf_counter(), _made(harness)
    while harness.loop.step():
        pass
    return (_made(harness) - before) / (time.perf_counter() - started)


def _made(harness: object) -> int:
    return sum(len(harness.tokens(str(number))) for number in range(ROWS))  # type: ignore[attr-defined]


def _theirs(model: nn.Module, prompts: list[list[int]]) -> float | None:
    try:
        generator = BatchGenerator(model, max_tokens=4 + STEPS, prefill_batch_size=ROWS)
        generator.close()
        generator.insert(prompts)
        while len(generator.next()[1]) < ROWS:
            pass
        started, made = time.perf_counter(), 0
        while tokens := generator.next()[1]:
            made += len(tokens)
        seconds = time.perf_counter() - started
        mx.synchronize()
        return made / seconds
    except Exception:  # noqa: BLE001 - its batches do not take every family
        return None


def _line(row: Family) -> str:
    return " | ".join(cells(row))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of tests/model/configurations.json; default: all")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "families.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
