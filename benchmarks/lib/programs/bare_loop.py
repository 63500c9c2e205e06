"""Generates with mlx-lm's `BatchGenerator` alone, without HTTP and without decoding text. The benchmark starts it.

    python benchmarks/lib/programs/bare_loop.py MODEL_DIR

Each line of stdin is {"prompts": [text, …], "max_tokens": n}. The answer is one line on stdout: a JSON list with the
times, in seconds, of each row's tokens. All prompts start together, are decoded greedily, and run to `max_tokens`.
"""

import json
import sys
import time
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

from mlx_lm import load  # isort: skip
from mlx_lm.generate import BatchGenerator  # isort: skip


def main() -> None:
    model, tokenizer = load(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [tokenizer.encode(text) for text in order["prompts"]]
        print(json.dumps(generate(model, prompts, order["max_tokens"])), flush=True)


def generate(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
    generator = BatchGenerator(model, completion_batch_size=len(prompts), prefill_batch_size=len(prompts))
    rows: dict[int, list[float]] = {uid: [] for uid in generator.insert(prompts, [max_tokens] * len(prompts))}
    while drawn := generator.next_generated():
        now = time.perf_counter()
        for response in drawn:
            rows[response.uid].append(now)
    generator.close()
    return list(rows.values())


if __name__ == "__main__":
    main()
