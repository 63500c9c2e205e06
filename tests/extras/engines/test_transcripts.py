"""vLLM, SGLang and MAX cannot run here. scripts/engine_transcripts sends the requests of our engines to the routes of
the published packages; these tests replay what they answered, byte for byte except for the adapter's name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from extras.engines.engine_rig import REQUEST, VERSION, Made, answered, make
from extras.engines.engine_server import TranscriptServer, answers_of, scene, serving, transcript

from mlx_parallm.core.adapters import BASE_ADAPTER
from mlx_parallm.core.requests import FinishReason, RequestFinished, SequenceOutput
from mlx_parallm.errors import ConfigError, EngineError

KINDS = ("vllm", "sglang", "max")
SAMPLES = [((72, 73, 1), (-0.5, -1.25, -2.0)), ((72, 2), (-0.5, -0.25))]


def asked_of(server: TranscriptServer, folder: Path) -> list[tuple[str, Any]]:
    """With NAME for the adapter's name, which differs from run to run, and FOLDER for the folder."""
    names = {body["lora_name"] for _, body in server.asked if isinstance(body, dict) and "lora_name" in body}
    text = json.dumps(server.asked).replace(str(folder), "FOLDER")
    for name in names:
        assert name.startswith("policy-")
        assert name.endswith("-3")
        text = text.replace(name, "NAME")
    return [(route, body) for route, body in json.loads(text)]


async def replayed(kind: str, which: str, tmp_path: Path) -> tuple[Made, list[Any], list[tuple[str, Any]]]:
    """The engine that was made, its events, and what it asked."""
    exchanges = scene(kind, which)
    request = REQUEST if which == "draw" else dataclasses.replace(REQUEST, adapter=BASE_ADAPTER)
    with serving(answers_of(exchanges)) as server:
        made = make(kind, server.url, tmp_path / "sent")
        await made.engine._api.connect()
        events = await answered(made.engine, request)
        await made.engine.close()
    assert server.answers == []
    return made, events, asked_of(server, made.folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["draw", "base"])
async def test_a_draw_is_the_transcript(kind: str, which: str, tmp_path: Path) -> None:
    made, events, asked = await replayed(kind, which, tmp_path)
    assert asked == [(exchange["route"], exchange.get("body")) for exchange in scene(kind, which)]
    assert made.written == ([(VERSION, "peft")] if which == "draw" else [])
    assert not made.folder.exists(), "nothing is left behind"
    outputs, finished = events[:-1], events[-1]
    assert all(isinstance(event, SequenceOutput) for event in outputs)
    assert [(o.index, o.token_ids, o.sampling_logprobs) for o in outputs] == [
        (index, *sample) for index, sample in enumerate(SAMPLES)
    ]
    assert [o.text for o in outputs] == ["Hi!", "H"]
    assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH, FinishReason.STOP]
    assert isinstance(finished, RequestFinished)
    assert (finished.prompt_tokens, finished.completion_tokens) == (3, 5)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_field_that_is_asked_is_one_of_the_package(kind: str, tmp_path: Path) -> None:
    """vLLM ignores fields that it does not know, so that a misspelt one would go unnoticed."""
    schemas = transcript(kind)["schemas"]
    _, _, asked = await replayed(kind, "draw", tmp_path)
    checked = 0
    for route, body in asked:
        if schema := schemas.get(route.split()[1]):
            jsonschema.validate(body, schema)
            assert set(body) <= set(schema["properties"])
            checked += 1
    assert checked == (1 if kind == "sglang" else 3)


REFUSED = [
    ("vllm", "no lora", "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ("vllm", "no adapter there", "No adapter found for FOLDER/GONE"),
    ("sglang", "no lora", "Please set `--enable-lora`"),
    ("sglang", "no adapter there", "adapter_config.json"),
    ("max", "no lora", "LoRA functionality is not enabled"),
    ("max", "no adapter there", "Path must exist locally"),
    ("max", "no logprobs", "Start the server with --no-enable-overlap-scheduler"),
]


@pytest.mark.parametrize(("kind", "which", "reason"), REFUSED, ids=[f"{kind}: {which}" for kind, which, _ in REFUSED])
async def test_what_the_server_lacks_is_said_at_the_start(kind: str, which: str, reason: str, tmp_path: Path) -> None:
    with serving(answers_of(scene(kind, which))) as server:
        made = make(kind, server.url, tmp_path)
        with pytest.raises(ConfigError) as refusal:
            await made.engine.open(VERSION)
        await made.engine.close()
    assert reason in str(refusal.value)
    assert list(tmp_path.iterdir()) == [], "no file is left of it"


FORGOTTEN = [("vllm", "unknown model", "does not exist"), ("sglang", "unknown adapter", "never been loaded")]


@pytest.mark.parametrize(("kind", "which", "reason"), FORGOTTEN, ids=[kind for kind, _, _ in FORGOTTEN])
async def test_an_adapter_that_the_server_has_forgotten_fails_the_draw(
    kind: str, which: str, reason: str, tmp_path: Path
) -> None:
    """As after a restart of the server."""
    before = scene(kind, "draw")[:2]
    with serving([*answers_of(before), *answers_of(scene(kind, which))]) as server:
        made = make(kind, server.url, tmp_path)
        await made.engine._api.connect()
        with pytest.raises(EngineError, match=reason):
            await answered(made.engine)
        await made.engine.close()
