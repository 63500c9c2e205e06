"""A server loads adapters by their ids on the hub, of which there is a stand-in, as far as its operator allows that."""

from __future__ import annotations

from pathlib import Path

import pytest
from app.test_server import serving as running
from hub import serving_hub
from lora import layout_of, random_adapter
from server.keys import key_file
from tiny import save_tiny

from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import configure
from mlx_parallm.extras import hub as extra

PROMPT = {"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.timeout(60)
async def test_an_allowed_id_is_loaded_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny("llama", tmp_path / "model")
    write_peft(tmp_path / "files", random_adapter(layout_of(model), 1, size=2.0), layout_of(model), "org/base")
    files = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    monkeypatch.setattr(extra, "FOLDER", tmp_path / "downloads")
    file, sent = key_file(tmp_path, boss="admin", asks="inference", acme=("train", {"adapters": ["acme*", "base"]}))
    config = configure(
        tmp_path / "model",
        adapters__allowed_hub_adapters="org/*,org/*@v1",
        server__kv_cache_memory="16MB",
        server__keys_file=str(file),
    )
    with serving_hub(monkeypatch) as hub:
        for name in ("org/tone", "org/acme-tone", "other/tone"):
            hub.with_files(name, files, "v1")
        async with running(IntegratedServer(config)) as client:

            async def load(key: str, path: str, name: str = "acme") -> tuple[int, str]:
                body = {"lora_name": name, "lora_path": path, "load_inplace": True}
                answer = await client.post("/v1/load_lora_adapter", json=body, headers=sent[key])
                return answer.status_code, answer.text

            async def tokens(model: str) -> list[int]:
                body = PROMPT | {"model": model}
                return (await client.post("/v1/completions", json=body, headers=sent["boss"])).json()["choices"][0][
                    "token_ids"
                ]

            assert (await load("asks", "org/tone"))[0] == 403
            assert (await load("acme", "org/tone"))[0] == 404, "its folder must have a fitting name too"
            assert (await load("boss", "other/tone"))[0] == 400
            by_folder = await client.post(
                "/v1/completions", json=PROMPT | {"adapters": "org/tone"}, headers=sent["boss"]
            )
            assert by_folder.status_code == 400, "a request for tokens downloads nothing"
            assert not hub.asked
            assert (await load("acme", "org/acme-tone@v1"))[0] == 200
            assert await tokens("acme") != await tokens("base")
            status, text = await load("boss", "org/none", "none")
            assert (status, "the adapter 'org/none' of the hub cannot be loaded" in text) == (400, True)
            assert (await load("boss", "org/tone", "tone"))[0] == 200
            assert await tokens("tone") == await tokens("acme")
