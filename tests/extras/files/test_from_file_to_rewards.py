"""From a file of answers to an adapter, and from that to GRPO, with the commands that people type."""

from __future__ import annotations

import json
import re
import shlex
from itertools import product
from pathlib import Path

import pytest

from mlx_parallm.cli.main import train
from mlx_parallm.rl.tracking import Made, read_metrics

KINDS = {"positive": ("superb", "lovely", "great", "kind"), "negative": ("dull", "awful", "bad", "rude")}
PAIRS = [(f"The {noun} was {word}. Positive or negative?", kind) for kind, words in KINDS.items()
         for noun, word in product(("film", "meal", "hotel", "book", "song", "trip"), words)]  # fmt: skip


def losses(made: list[Made], name: str) -> list[float]:
    return [value for each in made if (value := each.report.metrics.get(name)) is not None]


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_answers_are_imitated_and_rewards_go_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(json.dumps({"prompt": p, "completion": a}) for p, a in PAIRS))
    Path("tasks.jsonl").write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in PAIRS))
    argv = "--sft rows.jsonl --held-out 0.15 --held-out-every 2 --steps 4 --learning-rate 1e-3 --lora-rank 4"
    assert train([*argv.split(), "--checkpoint-dir", "first"]) == 0
    printed = capsys.readouterr().out
    made = read_metrics(Path("first/metrics.jsonl"))
    held_out = losses(made, "held_out_loss")
    assert len(held_out) == 3
    assert held_out[-1] < held_out[0] / 2
    assert losses(made, "perplexity")[-1] < losses(made, "perplexity")[0] / 2
    assert re.search(r"step +loss +perplexity +held-out +grad +length", printed)
    (command,) = re.findall(r"go on with rewards: `mlx_parallm_train (.*?)`", printed)
    argv = command.replace("FILE_OR_NAME", "tasks.jsonl").replace("--steps 100", "--steps 1")
    more = "--reward exact --max-tokens 4 --group-size 2 --prompts-per-step 2 --checkpoint-dir next"
    assert train([*shlex.split(argv), *more.split(), "--eval-every", "1", "--eval-size", "8"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"adapter +default, rank 4, alpha 32, ", printed)
    found = re.search(r"evaluation of default@1 before the first step: ([\d.]+)", printed)
    assert found is not None
    assert float(found[1]) >= 0.5, "the base model earns nothing: it answers in whole sentences"
