"""Request fields of the first sketch, on a server with a tiny model: `adapters` as a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora import layout_of, random_adapter
from main_job.serving import Server, start, stop
from tiny import save_tiny, tiny_model

from mlx_parallm.adapters.files.write import write_mlx_lm

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and an adapter inside and one outside of the allowed root."""
    made = tmp_path_factory.mktemp("sketch")
    save_tiny("llama", made / "model")
    layout = layout_of(tiny_model("llama"))
    for seed, name in enumerate(("roots/tone", "outside")):
        write_mlx_lm(made / name, random_adapter(layout, seed, size=0.5), layout)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    running = start("--model-path", str(folder / "model"), "--allowed-adapter-roots", str(folder / "roots"))
    yield running
    stop(running)


def ask(server: Server, **fields: Any) -> Any:
    return server.post("/v1/completions", prompt=PROMPT, max_tokens=6, temperature=0, ignore_eos=True, **fields)


def test_adapters_may_be_a_folder_under_an_allowed_root(server: Server, folder: Path) -> None:
    plain = ask(server)
    tuned = ask(server, adapters=str(folder / "roots" / "tone"))
    name = tuned["lora_adapter"].removesuffix("@1")
    assert name.startswith("tone.")
    assert tuned["choices"][0]["text"] != plain["choices"][0]["text"]
    for again in ({"adapters": "./tone"}, {"adapters": name}, {"lora_adapter": name}):
        assert ask(server, **again)["choices"] == tuned["choices"]
    assert [card["id"] for card in server.get("/v1/adapters")["data"]] == [f"{name}@1"]


def test_a_folder_elsewhere_is_refused_as_a_load_refuses_it(server: Server, folder: Path) -> None:
    outside = str(folder / "outside")
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "adapters": outside})
    load = server.http.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": outside})
    assert answer.status_code == load.status_code == 400
    error, refusal = answer.json()["error"], load.json()["error"]
    assert (error["param"], error["message"]) == ("adapters", refusal["message"])
    assert "allowed roots" in error["message"]
