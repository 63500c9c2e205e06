"""Trackers: what they get, and that they can neither stop nor delay training."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mlx_parallm.config import TrackerName
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.trackers import TrackedRun, check_installed, trackers_of
from mlx_parallm.rl.tracking import JsonlTracker, Record, Tracking

UPDATE = Record(
    "update", 3, {"loss": 0.5, "grad_norm": math.inf, "eval_mean": 0.25}, {"adapter": "default", "version": 4}, 7.5
)
OTHER = Record("evaluation", 2, {"eval_mean": 0.75}, {"adapter": "tone", "version": 1}, 8.5)


def run(folder: Path) -> TrackedRun:
    return TrackedRun(folder, "0a1b2c3d", "film", "default", {"model": {"lora_rank": 16}})


class Kept:
    """A tracker that keeps its records. `error`: raised by each write; `gate`: each write waits for it."""

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.records: list[Record] = []
        self.threads: set[str] = set()
        self.closed = False
        self.error = error
        self.gate = gate

    def write(self, record: Record) -> None:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


# ---- threads -------------------------------------------------------------------------------------


def test_a_tracker_that_raises_is_told_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Kept(), Kept(error=RuntimeError("no network"))
    tracking = Tracking({"bad": lambda: bad, "good": lambda: good})
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            tracking.write(UPDATE)
        tracking.close()
    assert (len(good.records), bad.closed) == (5, True)
    assert tracking.failures == {"bad": 5}
    assert caplog.messages == ["tracker bad fails, and training goes on: RuntimeError: no network"]


def test_a_tracker_that_hangs_delays_nothing_and_is_left_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    stuck, good = Kept(gate=threading.Event()), Kept()
    tracking = Tracking({"stuck": lambda: stuck, "good": lambda: good}, max_queued=4)
    for step in range(10):
        tracking.write(Record("update", step, {}))
        while len(good.records) <= step:
            time.sleep(0.001)
    tracking.close(timeout_s=0.1)
    assert not stuck.gate.is_set()
    assert len(good.records) == 10
    assert 5 <= tracking.failures["stuck"] <= 6, "four wait, one is being written"
    assert caplog.messages == [
        "tracker stuck fails, and training goes on: it is too slow: 4 records wait",
        "tracker stuck has not ended after 0.1 s; what it had not written is lost",
    ]
    stuck.gate.set()


# ---- what each writes ----------------------------------------------------------------------------


def written(folder: Path, *wanted: TrackerName, log: Path | None = None) -> Tracking:
    file = log or folder / "metrics.jsonl"
    tracking = Tracking({"jsonl": lambda: JsonlTracker(file), **trackers_of(run(folder), wanted)})
    tracking.write(UPDATE)
    tracking.write(OTHER)
    tracking.close()
    return tracking


def test_the_jsonl_file_has_a_line_for_each_record_and_is_appended_to(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path)
    written(tmp_path, log=tmp_path / "log.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = {"at": 7.5, "kind": "update", "step": 3, "loss": 0.5, "grad_norm": None, "eval_mean": 0.25}
    second = {"at": 8.5, "kind": "evaluation", "step": 2, "eval_mean": 0.75}
    assert lines == 2 * [{**first, "adapter": "default", "version": 4}, {**second, "adapter": "tone", "version": 1}]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def test_a_line_that_the_disk_had_no_room_for_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "metrics.jsonl", os.write
    path.write_text('{"step": 1}\n{"st')
    tracker = JsonlTracker(path)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:20]))
        with pytest.raises(OSError, match="No space left on device"):
            tracker.write(UPDATE)
    tracker.write(OTHER)
    first, cut, last = path.read_text().splitlines()
    assert (json.loads(first)["step"], cut, json.loads(last)["step"]) == (1, '{"st', 2)


MODULES = {TrackerName.TENSORBOARD: "tensorboardX"}


class FakePackage:
    """Stands in for the package of a tracker: keeps every call, as its name and its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        self.calls: list[tuple[object, ...]] = []
        made = ModuleType(module)
        made.__spec__ = SimpleNamespace(name=module)
        for name in ("init", "SummaryWriter"):
            setattr(made, name, self.opened(name))
        monkeypatch.setitem(sys.modules, module, made)

    def opened(self, name: str):
        def call(*args: object, **options: object) -> FakePackage:
            self.calls.append((name, args, options))
            return self

        return call

    def __getattr__(self, name: str):
        return lambda *args, **options: self.calls.append((name, args, options))


CONFIG = {"model": {"lora_rank": 16}}
CALLS: dict[TrackerName, list[tuple[str, tuple[object, ...], dict[str, object]]]] = {
    # Scalars are below the run's folder.
    TrackerName.TENSORBOARD: [
        ("SummaryWriter", ("FOLDER/tensorboard",), {}),
        ("add_scalar", ("train/loss", 0.5, 3, 7.5), {}),
        ("add_scalar", ("eval/mean", 0.25, 3, 7.5), {}),
        ("flush", (), {}),
        ("add_scalar", ("tone/eval/mean", 0.75, 2, 8.5), {}),
        ("flush", (), {}),
        ("close", (), {}),
    ],
    # Runs are offline, in the run's folder.
    TrackerName.WANDB: [
        (
            "init",
            (),
            {
                **{"project": "mlx-parallm", "id": "0a1b2c3d", "name": "film", "dir": "FOLDER"},
                **{"config": CONFIG, "mode": "offline"},
            },
        ),
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"train/loss": 0.5, "eval/mean": 0.25, "step": 3},), {}),
        ("log", ({"tone/eval/mean": 0.75, "step": 2},), {}),
        ("finish", (), {}),
    ],
    # A run is continued by its name.
    TrackerName.TRACKIO: [
        ("init", (), {"project": "mlx-parallm", "name": "film", "config": CONFIG, "resume": "allow"}),
        ("log", ({"train/loss": 0.5, "eval/mean": 0.25},), {"step": 3}),
        ("log", ({"tone/eval/mean": 0.75},), {"step": 2}),
        ("finish", (), {}),
    ],
}


@pytest.mark.parametrize("name", TrackerName)
def test_what_the_package_of_a_tracker_is_asked(
    name: TrackerName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = FakePackage(monkeypatch, MODULES.get(name, name.value))
    written(tmp_path, name)
    assert repr(package.calls).replace(str(tmp_path), "FOLDER") == repr(CALLS[name])


@pytest.mark.parametrize("name", TrackerName)
def test_a_missing_package_is_an_error_that_names_its_extra(name: TrackerName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULES.get(name, name.value), None)
    with pytest.raises(ConfigError, match=rf"trackers: {name.value}: .*pip install 'mlx-parallm\[{name.value}\]'"):
        check_installed([name])
