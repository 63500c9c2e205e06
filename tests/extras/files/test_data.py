"""Which rows are held out, and the order of the others."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.files.data import FileSettings, TrainingData
from mlx_parallm.extras.files.forms import FileKind


def written(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl") -> FileSettings:
    (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    return FileSettings(FileKind.SFT, str(tmp_path / name), 0.0, batch_size=4)


def prompts(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{number}", "completion": "c"} for number in range(count)]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    settings = written(tmp_path, prompts(18))
    data = TrainingData(settings)
    assert (data.steps_an_epoch, data.steps) == (5, 5)
    epochs = [[data.batch(step) for step in range(first, first + 5)] for first in (1, 6)]
    for number, batches in enumerate(epochs, 1):
        assert sorted(row for batch in batches for row in batch.rows) == list(range(18))
        assert {batch.epoch for batch in batches} == {number}
        assert {len(batch.rows) for batch in batches} == {3, 4}
    assert epochs[0] != epochs[1]
    again = TrainingData(settings)
    assert [again.batch(step) for step in (8, 2, 9)] == [data.batch(step) for step in (8, 2, 9)]
    assert TrainingData(replace(settings, seed=1)).batch(1) != data.batch(1)


def test_rows_with_one_question_are_held_out_together(tmp_path: Path) -> None:
    rows = prompts(60) * 2
    data = TrainingData(replace(written(tmp_path, rows), held_out=0.1))
    held = Counter(rows[number]["prompt"] for number in data.held_out)
    trained = {rows[int(number)]["prompt"] for number in data.file.trained}
    assert sum(held.values()) == 12
    assert set(held.values()) == {2}
    assert not held.keys() & trained
    assert len(data.held_out) + len(data.file.trained) == len(rows)


def test_nothing_is_held_out_if_all_rows_ask_the_same(tmp_path: Path) -> None:
    data = TrainingData(replace(written(tmp_path, prompts(1) * 40), held_out=0.1))
    assert (data.held_out, len(data.file.trained)) == ([], 40)


def test_another_file_may_be_held_out(tmp_path: Path) -> None:
    written(tmp_path, [{"text": "a"}], "other.jsonl")
    data = TrainingData(replace(written(tmp_path, prompts(3)), held_out=str(tmp_path / "other.jsonl")))
    assert [example.answers for _, example in data.held_out_examples()] == [("a",)]
    assert len(data.file.trained) == 3


def test_unusable_rows_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*prompts(3), {"promt": "a"}, 7, *prompts(2)]
    data = TrainingData(written(tmp_path, rows))
    assert len(data.file.trained) == 5
    assert data.file.left_out_count == 2
    assert "line 4 of" in caplog.text
    assert "line 5 of" in caplog.text
    assert "did you mean 'prompt'" in caplog.text


def test_a_file_whose_rows_are_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--sft: 1 of the 21 rows of .* can be used; line 2 of .* is left out: it has"
    ):
        TrainingData(written(tmp_path, [*prompts(1), *[{"chosen": "a"}] * 20]))
    with pytest.raises(ConfigError, match=r"rows.jsonl has no rows"):
        TrainingData(written(tmp_path, []))


def test_the_fingerprint_is_that_of_the_batches(tmp_path: Path) -> None:
    settings = written(tmp_path, prompts(20))
    first = TrainingData(settings).fingerprint
    assert TrainingData(settings).fingerprint == first
    changed = [replace(settings, batch_size=5), replace(settings, seed=1), replace(settings, held_out=0.2)]
    changed.append(written(tmp_path, prompts(21), "more.jsonl"))
    changed.append(written(tmp_path, [{**row, "completion": "other"} for row in prompts(20)], "answers.jsonl"))
    assert all(TrainingData(each).fingerprint != first for each in changed)


def test_the_fingerprint_is_that_of_the_rows_that_are_held_out(tmp_path: Path) -> None:
    def fingerprint(text: str) -> float:
        held_out = written(tmp_path, [{"text": text}], "other.jsonl").name
        return TrainingData(replace(written(tmp_path, prompts(3)), held_out=held_out)).fingerprint

    assert fingerprint("a") == fingerprint("a") != fingerprint("b")
