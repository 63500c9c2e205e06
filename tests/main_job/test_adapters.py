"""Adapters on the real model in a real process: named, mixed, replaced, routed, refused, and kept through a crash.

Seeds and `PROMPT` are such that no greedy token here has its runner-up within 0.003 in logprob: what an adapter says
alone it says in any batch.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import openai
import pytest
from lora import QV, layout_of, random_adapter
from main_job.bad_adapters import BAD_TAGS, bad_loads, good_folder
from main_job.serving import PROMPT, SERVED, Said, Server, start, stop

from mlx_parallm.adapters.files import read_adapter, write_mlx_lm
from mlx_parallm.adapters.layout import AdapterLayout
from mlx_parallm.model.bundled import load_bundled

ADAPTERS = tuple(f"a{i}" for i in range(10))
LONG = 16
"""Tokens of a stream that things happen beside."""
LOAD, UNLOAD, ROUTE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters/route"
SAVE, ROLLBACK = "/training/checkpoint", "/v1/adapters/rollback"
MAIN = (sys.executable, "-c", "import sys; from mlx_parallm.cli.main import main; sys.exit(main())")


@dataclass(frozen=True)
class Folders:
    """`adapters`: the server's --adapter-dir. `loose`: its allowed root. `outside`: a good adapter in neither."""

    root: Path
    layout: AdapterLayout

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def loose(self) -> Path:
        return self.root / "loose"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def flags(self) -> tuple[str, ...]:
        """Two slots and two copies, so that versions are evicted to memory, and to their files."""
        return (
            *("--adapter-dir", str(self.adapters), "--allowed-adapter-roots", str(self.loose)),
            *("--checkpoint-dir", str(self.root / "checkpoints"), "--max-loras", "2", "--max-cpu-loras", "2"),
            "--debug",
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made = Folders(tmp_path_factory.mktemp("served"), layout_of(load_bundled(dequantize=False)[0]))
    for seed, name in enumerate(ADAPTERS):
        targets, rank = (() if seed % 2 else QV), 4 + 4 * (seed % 3)
        weights = random_adapter(made.layout, seed, rank, targets, size=0.5)
        write_mlx_lm(made.adapters / name, weights, made.layout)
    made.loose.mkdir()
    good_folder(made.outside)
    return made


@pytest.fixture(scope="module")
def before(folders: Folders) -> dict[str, str]:
    """What selectors said in a server that saved checkpoints and was killed while it worked."""
    running = start(*folders.flags())
    try:
        running.post(LOAD, lora_name="default", lora_path="a2")
        first = running.post(SAVE, checkpoint_name="good", metrics={"reward": 0.5})
        running.post(LOAD, lora_name="default", lora_path="a3", load_inplace=True)
        second = running.post(SAVE)
        running.post(LOAD, lora_name="kept", lora_path="a4")
        running.post(SAVE, lora_name="kept")
        said = {selector: running.ask(selector).text for selector in ("default@1", "default@2", "kept")}
        next(running.stream("kept", LONG))
    finally:
        running.process.kill()
    assert running.process.wait() == -signal.SIGKILL
    assert [(saved["name"], saved["lora_adapter"]) for saved in (first, second)] == [
        ("checkpoint-1", "default@1"),
        ("checkpoint-2", "default@2"),
    ]
    return said


@pytest.fixture(scope="module")
def server(folders: Folders, before: dict[str, str]) -> Iterator[Server]:
    """Started on what the killed one left."""
    running = start(*folders.flags())
    yield running
    stop(running)


@pytest.fixture(scope="module")
def alone(server: Server) -> Callable[[str], str]:
    """A selector's text with no other request beside it."""
    return cache(lambda selector: server.ask(selector).text)


def test_a_killed_servers_checkpoints_are_served_again(server: Server, before: dict[str, str]) -> None:
    holds = {"default": "default@2", "latest": "default@2", "checkpoint-2": "default@2", "kept": "kept@1"}
    holds |= dict.fromkeys(("checkpoint-1", "good"), "default@1")
    said = {selector: server.ask(selector) for selector in holds}
    text = {"default@1": before["default@1"], "default@2": before["default@2"], "kept@1": before["kept"]}
    assert said == {selector: Said(text[version], version) for selector, version in holds.items()}
    assert server.post(LOAD, lora_name="default", lora_path="a4", load_inplace=True)["lora_adapter"] == "default@3"
    saved = server.post(SAVE)
    assert (saved["name"], saved["lora_adapter"], saved["tags"]) == ("checkpoint-3", "default@3", ["latest"])
    assert server.ask("latest") == Said(before["kept"], "default@3")


def test_every_way_to_name_an_adapter(server: Server, alone: Callable[[str], str]) -> None:
    client = server.client()

    def ask(model: str, **extra: str) -> Said:
        done = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=6, temperature=0, extra_body={"ignore_eos": True, **extra}
        )
        assert done.model == (model if model == "a0" else model.partition("@")[0] if not extra else "a0")
        return Said(done.choices[0].text, done.model_extra.get("lora_adapter"))

    ways = [ask("a0"), ask("a0@1"), ask(SERVED, lora_adapter="a0"), ask(SERVED, adapters="a0@1")]
    assert ways == [Said(alone("a0"), "a0@1")] * 4
    assert [server.ask(), server.ask(SERVED), server.ask("base")] == [Said(alone("base"), None)] * 3
    assert alone("a0") != alone("base")
