"""Measures the time of sampling one step, by sampling option and number of rows.

    python benchmarks/studies/sampler.py [--rows 1 16 32] [--vocab 49152] [--exponent 1.75]
        [--repeats 15] [--out sampler.json]

Probabilities follow a power law over the vocabulary, rank**-exponent. An exponent of 1.75 is peaked like a language
model's next token; 0.1 is nearly flat, the worst case for top-p. The cases take turns, so that a busy machine affects
all of them alike. The medians of the repeats are reported in milliseconds.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import mlx_parallm  # before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
from mlx_parallm.batch.sampling import RowSampling, TokenCounts, has_penalties, plan_sampling, sample
from mlx_parallm.core.requests import SamplingParams
from mlx_parallm.model.device import prepare_device

GREEDY = SamplingParams(temperature=0.0)
CASES: dict[str, tuple[list[SamplingParams], bool]] = {
    "greedy": ([GREEDY], False),
    "half at temperature 1": ([GREEDY, SamplingParams()], False),
    "temperature 1": ([SamplingParams()], False),
    "temperature 1, sampling logprobs": ([SamplingParams()], True),
    "min-p 0.05": ([SamplingParams(min_p=0.05)], False),
    "top-k 50": ([SamplingParams(top_k=50)], False),
    "top-p 0.9": ([SamplingParams(top_p=0.9)], False),
    "top-k 20, top-p 0.8": ([SamplingParams(top_k=20, top_p=0.8)], False),
    "greedy, presence penalty": ([SamplingParams(temperature=0.0, presence_penalty=0.5)], False),
    "greedy, two penalties": ([SamplingParams(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1)], False),
    "greedy, logprobs": ([SamplingParams(temperature=0.0, top_logprobs=0)], False),
    "greedy, 20 top logprobs": ([SamplingParams(temperature=0.0, top_logprobs=20)], False),
}


def main() -> None:
    arguments = _arguments()
    prepare_device()
    results = {
        str(rows): _medians(_steps(rows, arguments.vocab, arguments.exponent), arguments.repeats)
        for rows in arguments.rows
    }
    _print_table(results)
    if arguments.out:
        setting = {"vocab": arguments.vocab, "exponent": arguments.exponent, "repeats": arguments.repeats}
        report = {"machine": _machine(), "setting": setting, "median_ms": results}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--exponent", type=float, default=1.75)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _steps(rows: int, vocab: int, exponent: float) -> dict[str, Callable[[int], list[mx.array]]]:
    ranks = mx.argsort(mx.random.uniform(shape=(rows, vocab), key=mx.random.key(0)), -1)
    logits = -exponent * mx.log(ranks + 1.0)
    mx.eval(logits)
    return {name: _step(logits, options, wanted) for name, (options, wanted) in CASES.items()}


def _step(logits: mx.array, options: list[SamplingParams], wanted: bool) -> Callable[[int], list[mx.array]]:
    rows, vocab = logits.shape
    chosen = [options[i % len(options)] for i in range(rows)]
    batch = [
        RowSampling(p, sampling_logprobs=wanted, counts=TokenCounts((1, 2), (), vocab) if has_penalties(p) else None)
        for p in chosen
    ]
    plan = plan_sampling(batch, vocab)
    return lambda step: sample(logits, plan, [step] * rows).arrays()


def _medians(steps: dict[str, Callable[[int], list[mx.array]]], repeats: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            mx.eval(step(repeat))
            taken[name].append(1e3 * (time.perf_counter() - started))
    return {name: round(statistics.median(times[1:]), 3) for name, times in taken.items()}


def _machine() -> dict[str, str]:
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
        "blas": mlx_parallm.BLAS.name,
    }


def _print_table(results: dict[str, dict[str, float]]) -> None:
    print(f"{'ms a step, rows:':34}" + "".join(f"{rows:>9}" for rows in results))
    for name in CASES:
        print(f"{name:34}" + "".join(f"{medians[name]:9.2f}" for medians in results.values()))


if __name__ == "__main__":
    main()
