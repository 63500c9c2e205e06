"""Sends requests to the routes of a serving package in this process, and writes what they answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

TRANSCRIPTS = Path(__file__).parents[2] / "tests" / "extras" / "engines" / "transcripts"

MODEL = "org/model"
PROMPT = [5, 6, 7]
DRAWN = (((72, 73, 1), (-0.5, -1.25, -2.0), "length"), ((72, 2), (-0.5, -0.25), "stop"))
"""Made up: (token ids, their logprobs, finish reason) of the two answers to every request."""
TEXTS = {72: "H", 73: "i", 1: "!", 2: ""}
"""The last token ends an answer, so it has no text."""
LORA = {"lora_name": "NAME", "lora_path": "FOLDER/NAME"}
GONE = {"lora_name": "NAME", "lora_path": "FOLDER/GONE"}
"""A folder that has no adapter."""

Request = tuple[str, Any]
"""A route and a body, such as `("POST /generate", {...})`."""

MODELS: Request = ("GET /v1/models", None)
COMPLETIONS = "POST /v1/completions"
LOAD, UNLOAD = "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"
"""Routes of vLLM, which other packages have too."""


def text_of(ids: Any) -> str:
    return "".join(TEXTS[token] for token in ids)


def unpacked(package: str) -> Path:
    """The folder that the command line names, from which the package is imported from now on."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / package).is_dir():
        sys.exit(f"usage: {sys.argv[0]} FOLDER, where the published wheel of {package} is unpacked")
    sys.path.insert(0, sys.argv[1])
    return Path(sys.argv[1])


def version_of(folder: Path, package: str) -> str:
    """The version in the metadata of the unpacked wheel."""
    (metadata,) = folder.glob(f"{package}-*.dist-info/METADATA")
    return next(line.split()[1] for line in metadata.read_text().splitlines() if line.startswith("Version:"))


@dataclass
class Recording:
    """What one package answers.

    Attributes:
        scenes: by name, the requests in their order, each with the status and the exact text of its answer.
        schemas: JSON schemas of request bodies, by route.
    """

    package: str
    version: str
    made_from: list[str]
    made_up: str
    scenes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    schemas: dict[str, Any] = field(default_factory=dict)

    async def scene(self, name: str, app: Any, *requests: Request) -> None:
        """Sends requests to an ASGI app, and keeps the answers."""
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        exchanges = []
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            for route, body in requests:
                method, path = route.split()
                answer = await client.request(method, path, json=body)
                asked = {} if body is None else {"body": body}
                exchanges.append({"route": route, **asked, "status": answer.status_code, "answer": answer.text})
        self.scenes[name] = exchanges

    async def lora_scenes(self, served: Callable[..., Any], draw: Callable[[str], Request]) -> None:
        """The scenes of a server with vLLM's routes for adapters.

        Args:
            served: makes its app; with `lora=False`, one that serves no adapters.
            draw: a request for completions of the model of a name.
        """
        await self.scene("draw", served(), MODELS, (LOAD, LORA), draw("NAME"), (UNLOAD, {"lora_name": "NAME"}))
        await self.scene("base", served(), MODELS, draw(MODEL))
        await self.scene("no adapter there", served(), MODELS, (LOAD, GONE))
        await self.scene("unload unknown", served(), (UNLOAD, {"lora_name": "NAME"}))
        await self.scene("no lora", served(lora=False), MODELS, (LOAD, LORA))

    def write_lora_scenes(self, completion: Any, load: Any, unload: Any, stood_in_for: list[str]) -> None:
        """Writes the recording with the schemas of these request classes."""
        classes = {COMPLETIONS: completion, LOAD: load, UNLOAD: unload}
        self.schemas = {route.split()[1]: made.model_json_schema() for route, made in classes.items()}
        self.write(stood_in_for)

    def write(self, stood_in_for: list[str]) -> None:
        about = (
            f"Not recorded from a running server: answers of the routes of {self.package} {self.version}, as "
            f"published, imported and called in one process. {self.made_up} "
            f"Made by scripts/engine_transcripts/from_{self.package}.py."
        )
        made = {
            "about": about,
            "package": self.package,
            "version": self.version,
            "made_from": self.made_from,
            "stood_in_for": stood_in_for,
            "scenes": self.scenes,
            "schemas": {route: _bare(schema) for route, schema in self.schemas.items()},
        }
        path = TRANSCRIPTS / f"{self.package}.json"
        path.write_text(json.dumps(made, indent=1) + "\n")
        for name, exchanges in self.scenes.items():
            for exchange in exchanges:
                print(f"{name:20} {exchange['route']:32} {exchange['status']} {exchange['answer'][:110]}")


def _bare(schema: Any) -> Any:
    """The schema without titles and descriptions."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    texts = {key for key in ("title", "description") if isinstance(schema.get(key), str)}
    return {key: _bare(value) for key, value in schema.items() if key not in texts}
