"""The second stage: real clients against a real server. Collected only when this folder is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients.running import Report, install_node, wait_until_idle
from main_job.serving import Server, start, stop


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what is marked as `large`, unless the command names its file."""
    named = {Path(argument.partition("::")[0]).name for argument in config.args}
    for item in items:
        large = item.get_closest_marker("large")
        if large is not None and item.path.name not in named:
            item.add_marker(pytest.mark.skip(reason=f"{large.args[0]}: name {item.path.name} to run it"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`mlx_parallm_serve` on the bundled model; at the end nothing may be left in it."""
    running = start("--debug")
    yield running
    try:
        wait_until_idle(running)
    finally:
        stop(running)


@pytest.fixture(scope="session")
def pictures() -> Path:
    """The folder of the screenshots, which stay until the next run writes them again."""
    folder = Path(__file__).parents[2] / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def node() -> None:
    """openai-node, installed here by npm."""
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    install_node()


@pytest.fixture
def report(record_property: Callable[[str, Any], None]) -> Report:
    """Reports a figure for the record of `benchmarks/studies/rl_programs.py`. The test itself asserts the limit."""

    def record(name: str, value: float, unit: str = "", limit: float | None = None, at_least: bool = False) -> None:
        fields = {"name": name, "value": value, "unit": unit, "limit": limit, "at_least": at_least}
        record_property("figure", json.dumps(fields))

    return record
