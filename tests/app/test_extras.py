"""A server starts, answers and makes an update without each of the extras of training, and without all of them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

EXTRAS = {
    "atropos": ("rl.atropos", "app.atropos", "app.atropos_run", "server.protocols.atropos"),
    "averages": ("rl.averages", "adapters.average", "server.api.training.average"),
    "competition": ("rl.competition", "server.api.training.compare"),
    "curriculum": ("rl.rollouts.curriculum",),
    "lessons": ("rl.lessons", "app.lessons", "server.api.training.lessons"),
    "outside engines": ("rl.inference", "app.inference"),
    "people": ("rl.people", "server.api.training.people", "server.api.training.people_schema"),
    "ranks": ("ranks", "app.ranks"),
    "retrain": ("app.retrain", "config.retrain"),
    "reward models": (
        "rl.reward_models",
        "adapters.reward_models",
        "app.reward_model",
        "server.api.training.reward_model",
    ),
    "tinker": ("rl.tinker", "server.protocols.tinker"),
    "trackers": ("rl.tracking.trackers",),
    "verifiers": ("rl.environments.verifiers",),
}
"""The modules of each extra."""


def serve_without(folder: Path, *modules: str) -> None:
    program = Path(__file__).with_name("without_extras.py")
    names = [f"mlx_parallm.{module}" for module in modules]
    assert all(map(find_spec, names)), "a module has another name now"
    done = subprocess.run([sys.executable, program, folder, *names], capture_output=True, text=True, timeout=200)
    assert "served and trained without" in done.stdout, done.stderr[-4000:]


@pytest.mark.timeout(240)
def test_a_server_needs_none_of_the_extras(tmp_path: Path) -> None:
    serve_without(tmp_path, *chain(*EXTRAS.values()))


@pytest.mark.ci
@pytest.mark.timeout(240)
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_server_runs_without_an_extra(tmp_path: Path, extra: str) -> None:
    serve_without(tmp_path, *EXTRAS[extra])
