"""Adapters on the real model in a real process: mixed, replaced, and kept through a crash.

Seeds and `PROMPT` are such that no greedy token here has its runner-up within 0.003 in logprob: what an adapter says
alone it says in any batch.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from lora import QV, layout_of, random_adapter
from main_job.serving import Said, Server, asking, start, stop, text_of

from mlx_parallm.adapters.formats import write_mlx_lm
from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.model.bundled import load_bundled

pytestmark = pytest.mark.slow

ADAPTERS = tuple(f"a{i}" for i in range(10))
LONG = 12
"""Tokens of a stream that things happen beside."""
LOAD = "/v1/load_lora_adapter"
SAVE, ROLLBACK = "/training/checkpoint", "/v1/adapters/rollback"
Alone = Callable[[str], str]


@dataclass(frozen=True)
class Folders:
    """`adapters`: the server's --adapter-dir. `loose`: its allowed root."""

    root: Path
    layout: AdapterLayout

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def loose(self) -> Path:
        return self.root / "loose"

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
        with running.stream("kept", LONG) as live:
            next(live)
            running.process.kill()
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
def alone(server: Server) -> Alone:
    """A selector's text with no other request beside it."""
    return cache(lambda selector: server.ask(selector).text)


def test_a_killed_servers_checkpoints_are_served_again(server: Server, before: dict[str, str]) -> None:
    holds = {"default": "default@2", "latest": "default@2", "checkpoint-2": "default@2", "kept": "kept@1"}
    holds |= dict.fromkeys(("checkpoint-1", "good"), "default@1")
    with ThreadPoolExecutor(len(holds)) as pool:
        said = dict(zip(holds, pool.map(server.ask, holds), strict=True))
    text = {"default@1": before["default@1"], "default@2": before["default@2"], "kept@1": before["kept"]}
    assert said == {selector: Said(text[version], version) for selector, version in holds.items()}
    assert server.post(LOAD, lora_name="default", lora_path="a4", load_inplace=True)["lora_adapter"] == "default@3"
    saved = server.post(SAVE)
    assert (saved["name"], saved["lora_adapter"], saved["tags"]) == ("checkpoint-3", "default@3", ["latest"])
    assert server.ask("latest") == Said(before["kept"], "default@3")


def test_ten_adapters_in_two_slots_say_what_each_says_alone(server: Server, alone: Alone) -> None:
    expected = [Said(alone("base"), None), *(Said(alone(name), f"{name}@1") for name in ADAPTERS)]
    assert len({said.text for said in expected}) == len(expected)
    server.post(LOAD, lora_name="twin", lora_path="a7")  # the same files under two names
    with ThreadPoolExecutor(2 * len(expected)) as pool:
        said = list(pool.map(server.ask, ("base", *ADAPTERS) * 2))
    assert said == expected * 2
    listed = server.get("/v1/adapters")
    assert listed["slots"] == {"total": 2, "used": 2, "pinned": 0}
    assert Counter(card["residence"] for card in listed["data"])["slot"] == 2
    assert "file" in {card["residence"] for card in listed["data"] if card["name"] in ADAPTERS}


def test_a_load_in_place_reaches_new_requests_only(server: Server, folders: Folders, alone: Alone) -> None:
    """The files are replaced where they lie, while requests for the old ones run and come."""
    one, two = Said(alone("a0"), "changing@1"), Said(alone("a1"), "changing@2")
    load = {"lora_name": "changing", "lora_path": "changing", "load_inplace": True}
    shutil.copytree(folders.adapters / "a0", folders.loose / "changing")
    assert server.post(LOAD, **load)["lora_adapter"] == "changing@1"
    undisturbed = server.ask("changing", LONG)
    with asking(server, "changing") as told:
        stream = server.stream("changing", LONG)
        chunks = [next(stream)]
        shutil.copytree(folders.adapters / "a1", folders.loose / "changing", dirs_exist_ok=True)
        assert server.post(LOAD, **load)["lora_adapter"] == "changing@2"
        assert server.ask("changing") == two
        chunks += stream
    assert text_of(chunks) == undisturbed.text
    assert {chunk.model_extra.get("lora_adapter") for chunk in chunks} == {"changing@1"}
    assert {two} <= set(told) <= {one, two}

    assert server.post(LOAD, **load)["lora_adapter"] == "changing@2", "the same content"
    assert re.search(r'adapter_requests_total{.*adapter="changing".*version="2"', server.http.get("/metrics").text)
    assert server.post(ROLLBACK, lora_name="changing")["lora_adapter"] == "changing@1"
    assert server.ask("changing") == one
    assert server.ask("changing@2") == two
    assert server.http.post(ROLLBACK, json={"lora_name": "changing"}).status_code == 409


def test_books_are_clean_afterwards(server: Server) -> None:
    engine = server.get("/debug/state")["engine"]
    assert (engine["alive"], engine["running"], engine["waiting"], engine["kv_bytes_held"]) == (True, 0, 0, 0)
    listed = server.get("/v1/adapters")
    assert (listed["slots"]["pinned"], {card["leases"] for card in listed["data"]}) == (0, {0})
