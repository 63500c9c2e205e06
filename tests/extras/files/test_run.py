"""Runs on files, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from training_runs import View, config

from mlx_parallm.app.train import run
from mlx_parallm.app.training_run import TrainOptions
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.files.data import FileSettings, TrainingData
from mlx_parallm.extras.files.forms import FileKind
from mlx_parallm.extras.files.run import FileRun, FileRunSettings

ROWS: Mapping[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"say {n}", "completion": f"ab {n % 3}"} for n in range(12)],
    "dpo": [{"prompt": f"say {n}", "chosen": "yes", "rejected": "no no"} for n in range(6)],
    "kto": [{"prompt": f"say {n}", "completion": "yes" if n % 2 else "no", "label": n % 2 == 1} for n in range(6)],
}
USUAL = FileRunSettings()
LOSSES = {"sft": "cross_entropy", "dpo": "dpo", "kto": "kto"}


def made(
    tmp_path: Path,
    kind: str = "sft",
    steps: int | None = None,
    view: View | None = None,
    rate: float = 1e-2,
    rows: list[dict[str, Any]] | None = None,
    folder: str = "kept",
    how: FileRunSettings = USUAL,
    **settings: Any,
) -> tuple[int, View]:
    """A run, and what it showed. `held_out="same"`: the rows that are trained on."""
    file = tmp_path / f"{kind}.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS[kind] if rows is None else rows)))
    settings = {"batch_size": 4, **settings}
    if settings.get("held_out") == "same":
        settings["held_out"] = str(file)
    data, view = TrainingData(FileSettings(FileKind(kind), str(file), **settings)), view or View()
    asked = config(
        tmp_path,
        LOSSES[kind],
        checkpointing__checkpoint_dir=tmp_path / folder,
        rl_training__optimizer__learning_rate=rate,
    )
    options = TrainOptions(str(file), steps or data.steps, 8, 4)
    return run(asked, options, view, partial(FileRun, data=data, settings=how)), view


def figures(view: View, name: str) -> list[float]:
    return [report.metrics[name] for report in view.reports if name in report.metrics]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ROWS)
def test_the_held_out_loss_is_that_of_an_update_on_the_same_rows(tmp_path: Path, kind: str) -> None:
    """The loss of an update is that before its step, so it is the held-out loss after the step before."""
    how = FileRunSettings(every=1)
    status, view = made(tmp_path, kind, 3, how=how, batch_size=len(ROWS[kind]), held_out="same")
    assert status == 0
    losses, held_out = figures(view, "loss"), figures(view, "held_out_loss")
    assert losses[1:] == pytest.approx(held_out[:-1], rel=1e-4)
    assert f"loss {losses[0]:.3f}"[:-1] in view.facts["held out"]
    assert held_out[-1] < losses[0]
    if kind == "sft":
        assert figures(view, "perplexity")[0] == pytest.approx(2.718281828 ** losses[0], rel=1e-4)
    else:
        assert figures(view, "preference_accuracy")[1:] == pytest.approx(figures(view, "held_out_accuracy")[:-1])


@pytest.mark.timeout(120)
def test_a_run_that_is_stopped_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"held_out": 0.2, "epochs": 2, "how": FileRunSettings(every=2)}
    _, whole = made(tmp_path, folder="whole", **settings)
    stop = View(then=lambda view: os.kill(os.getpid(), signal.SIGINT) if len(view.reports) == 2 else None)
    assert made(tmp_path, view=stop, **settings)[0] == 128 + signal.SIGINT
    status, rest = made(tmp_path, **settings)
    assert (status, rest.made) == (0, 2)
    reports = [*stop.reports, *rest.reports]
    assert [report.metrics["loss"] for report in reports] == figures(whole, "loss")
    assert [each for report in reports if (each := report.metrics.get("held_out_loss"))] == figures(
        whole, "held_out_loss"
    )
    with pytest.raises(ConfigError, match="--sft: this run began with other rows or settings"):
        made(tmp_path, batch_size=3)


@pytest.mark.timeout(120)
def test_a_run_that_gets_worse_ends_early_with_its_best_version(tmp_path: Path) -> None:
    """The held-out answers are others than the trained ones, so the loss on them rises in the end."""
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({**row, "completion": "ab zzzzzzzz"}) for row in ROWS["sft"]))
    how = FileRunSettings(every=1, patience=2)
    status, view = made(tmp_path, steps=40, how=how, held_out=str(other), batch_size=6)
    losses = figures(view, "held_out_loss")
    assert status == 0
    assert len(losses) < 40
    best = losses.index(min(losses))
    assert best == len(losses) - 3
    last = view.reports[-1]
    assert last.adapter is not None
    assert last.adapter.version == best + 1
    assert f"no new low of the held-out loss since step {best + 1}" in last.reason
    folder = tmp_path / "kept" / "default"
    assert json.loads((folder / "tags.json").read_text()) == {"best": last.checkpoint, "final": last.checkpoint}
    assert (folder / "latest").read_text().strip() == last.checkpoint == f"checkpoint-{best + 1}"
    status, again = made(tmp_path, steps=40, how=how, held_out=str(other), batch_size=6)
    assert (status, again.reports) == (0, [])


@pytest.mark.timeout(120)
def test_rows_that_cannot_be_encoded_are_left_out_of_their_batch(tmp_path: Path) -> None:
    rows = [*ROWS["sft"], {"prompt": "long", "completion": "x" * 500}]
    status, view = made(tmp_path, rows=rows, held_out=0.0, batch_size=13, how=FileRunSettings(longest=100))
    assert status == 0
    assert figures(view, "left_out") == [1]
    assert figures(view, "trajectories") == [12]
    assert re.fullmatch(r"…?.*⏎<\|im_start\|>assistant⏎ ▸ ab \d<\|im_end\|>", view.facts["for example"])
    long = [{"text": "x" * 500}] * 4
    with pytest.raises(
        ConfigError, match=r"4 of the first 4 rows cannot be used; line .* it has 501 tokens of at most 100"
    ):
        made(tmp_path, rows=long, held_out=0.0, folder="none", how=FileRunSettings(longest=100))


@pytest.mark.timeout(120)
def test_a_step_of_which_no_row_can_be_used_is_skipped(tmp_path: Path) -> None:
    rows = [*ROWS["sft"][:2], {"prompt": "long", "completion": "x" * 500}]
    status, view = made(tmp_path, rows=rows, held_out=0.0, batch_size=1, how=FileRunSettings(longest=100))
    assert status == 0
    reports = {report.status: report.reason for report in view.reports}
    assert [report.status for report in view.reports].count("published") == 2
    assert reports["skipped"] == "none of its rows can be used"


@pytest.mark.timeout(120)
def test_a_run_begins_from_the_adapter_of_another(tmp_path: Path) -> None:
    """The next run's first loss is what the first run's held-out loss was in the end."""
    _, first = made(tmp_path, steps=3, held_out="same", batch_size=12, how=FileRunSettings(every=1))
    asked = config(
        tmp_path,
        "cross_entropy",
        checkpointing__checkpoint_dir=tmp_path / "next",
        adapters__init_from=tmp_path / "kept",
    )
    data, view = TrainingData(FileSettings(FileKind.SFT, str(tmp_path / "sft.jsonl"), 0.0, 12)), View()
    assert run(asked, TrainOptions("x", 1, 8, 4), view, partial(FileRun, data=data)) == 0
    assert figures(view, "loss") == pytest.approx(figures(first, "held_out_loss")[-1:], rel=1e-4)
