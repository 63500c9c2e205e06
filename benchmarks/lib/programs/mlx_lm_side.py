"""mlx-lm's side of `studies/files.py`: its LoRA trainer on given batches, with the adapter and settings of an order.

    python -m benchmarks.lib.programs.mlx_lm_side ORDER.json

`mlx_lm.tuner.trainer.train` runs unchanged. The order's `data` has the tokens of each row of each batch, and which of
them are trained. The loss is mlx-lm's own with this mask in place of one stretch a row.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx.optimizers import AdamW
from mlx_lm import load
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from benchmarks.lib.training.beside_tasks import RESULT, Order
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.model.layout import adapter_layout

_PADDED_TO = 32
"""mlx-lm pads a batch to one more than a multiple of this."""


class Watch(TrainingCallback):  # type: ignore[misc]  # mlx-lm has no types
    """Notes the figures of each update."""

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []
        self._began = (time.perf_counter(), time.process_time())

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        seconds, processor = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self.updates.append({"seconds": seconds, "processor": processor, "loss": train_info["train_loss"]})


def masked_loss(model: nn.Module, batch: mx.array, mask: mx.array) -> tuple[mx.array, mx.array]:
    losses = nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:]) * mask
    tokens = mask.sum()
    return losses.astype(mx.float32).sum() / tokens, tokens


def batches(dataset: Any, **_: Any) -> Iterator[tuple[mx.array, mx.array]]:
    """Of each batch, tokens [B, T] and the mask of all but the first, [B, T - 1]."""
    for rows in dataset:
        longest = max(len(row["tokens"]) for row in rows)
        shape = (len(rows), 1 + _PADDED_TO * -(-longest // _PADDED_TO))
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for place, row in enumerate(rows):
            tokens[place, : len(row["tokens"])] = row["tokens"]
            mask[place, : len(row["tokens"])] = row["trained"]
        yield mx.array(tokens), mx.array(mask[:, 1:])


def with_adapter(model: nn.Module, order: Order) -> None:
    """Adds the adapter of the order, which alone is trained."""
    weights = read_adapter(Path(order.adapter), adapter_layout(model), order.hyper.rank).weights
    model.freeze()
    keys = {".".join(path.split(".")[3:]) for path in weights.pairs}
    parameters = {"rank": weights.rank, "scale": weights.alpha / weights.rank, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), parameters)
    factors = {f"{path}.lora_{name}": getattr(pair, name) for path, pair in weights.pairs.items() for name in "ab"}
    model.load_weights([(name, mx.array(factor)) for name, factor in factors.items()], strict=False)


def main(order: Order) -> None:
    setting, folder = order.hyper, Path(order.folder)
    model, _ = load(order.model)
    with_adapter(model, order)
    optimizer = AdamW(
        setting.learning_rate,
        [setting.beta1, setting.beta2],
        setting.eps,
        setting.weight_decay,
        bias_correction=True,
    )
    given = order.batches()
    never = len(given) + 1
    arguments = TrainingArgs(
        len(given[0]),
        len(given),
        steps_per_report=1,
        steps_per_eval=never,
        steps_per_save=never,
        adapter_file=str(folder / "adapters.safetensors"),
    )
    watch = Watch()
    train(model, optimizer, given, None, arguments, masked_loss, batches, watch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    (folder / RESULT).write_text(json.dumps({"updates": watch.updates, "peak_mb": peak}))


if __name__ == "__main__":
    main(Order.read(Path(sys.argv[1])))
