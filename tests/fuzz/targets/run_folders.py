"""The small files of a run: each is read, or the reader says in one error which is damaged, or leaves its lines out."""

import json
import logging
import tempfile
from contextlib import suppress
from pathlib import Path

from fuzz.mutation import after_first_line, json_with, of_files, safetensors_with, unpacked

from mlx_parallm.adapters.runs import (
    METRICS,
    RECORD,
    VERSIONS_FILE,
    KeptVersions,
    adapter_in,
    process_of,
    stored_latest,
)
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.errors import AdapterFileError, ConfigError
from mlx_parallm.extras.lessons.cards import LessonCard
from mlx_parallm.extras.lessons.record import FILE as LESSON
from mlx_parallm.extras.lessons.record import read_lesson
from mlx_parallm.rl.runs.record import RunRecord, list_runs, read_record
from mlx_parallm.rl.tracking import read_metrics, recorded_events
from mlx_parallm.rl.trajectory_log import count_lines, of_trainee, remove_lines
from mlx_parallm.train.policy import PolicySnapshot

logging.disable(logging.WARNING)
LOG, TRAINER, OPTIMIZER = "trajectories.jsonl", "trainer.json", "optimizer.safetensors"
FILES = (RECORD, METRICS, LESSON, LOG, TRAINER, OPTIMIZER, "lock", "latest", f"math/{VERSIONS_FILE}", "math/tags.json")
FIELDS = [
    *RunRecord.__slots__, *LessonCard.__slots__, "adapter", "version", "at", "step", "kind", "status", "trainee",
    "optimizer_step", "numbers", "last", "live", "found", "spec",
]  # fmt: skip
of_json = json_with(FIELDS, ("running", "evaluation", "held", "checkpoint-1", "math", 1e308, 3))
mutated = of_files(
    {".jsonl": after_first_line(of_json), ".json": of_json, ".safetensors": safetensors_with(["m", "v"])}
)


def run(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "math" / "checkpoint-1").mkdir(parents=True)
        for file, content in unpacked(data).items():
            if file in FILES:
                (folder / file).write_bytes(content)
        with suppress(ConfigError):
            read_record(folder)
        with suppress(ConfigError):
            list(list_runs(folder))
        with suppress(ConfigError):
            KeptVersions(folder)
        with suppress(AdapterFileError):
            PolicySnapshot.load(folder, AdapterWeights({}))
        with suppress(AdapterFileError):
            adapter_in(folder / "math" / "best")
        read_lesson(folder)
        read_metrics(folder / METRICS)
        for event in recorded_events(folder / METRICS):
            json.dumps(event.data)
        process_of(folder)
        stored_latest(folder / "latest")
        trained = of_trainee("math")
        remove_lines(folder / LOG, trained)
        assert count_lines(folder / LOG, trained) == 0
