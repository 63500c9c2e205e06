"""An OutsideEngine of each kind, on a model whose tokens are single characters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import GenerationRequest, SamplingParams, StopParams
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.max import MaxApi
from mlx_parallm.extras.engines.mlx import MlxApi
from mlx_parallm.extras.engines.openai import OpenAIApi, VllmApi
from mlx_parallm.extras.engines.outside import OutsideEngine
from mlx_parallm.extras.engines.sglang import SglangApi
from mlx_parallm.extras.engines.sync import AdapterSync

PROMPT, EOS = (5, 6, 7), 2
VERSION = AdapterRef("policy", 3)
REQUEST = GenerationRequest(
    "r", (PROMPT,), SamplingParams(temperature=1.0, seed=40), StopParams(3), n=2, adapter=VERSION
)
TEXTS = {5: "a", 6: "b", 7: "c", 72: "H", 73: "i", 1: "!", EOS: "</s>"}


class Tokenizer:
    """Tokens are single characters, and `</s>`."""

    vocab_size = 100

    def decode(self, ids: Any) -> str:
        return "".join(TEXTS.get(token, f"<{token}>") for token in ids)

    def encode(self, text: str) -> list[int]:
        return [{text: token for token, text in TEXTS.items()}[character] for character in text]


APIS: dict[str, Callable[[EngineServer], Any]] = {
    "openai": lambda server: OpenAIApi(server, None),
    "vllm": lambda server: VllmApi(server, None),
    "sglang": SglangApi,
    "max": lambda server: MaxApi(server, None),
    "mlx": lambda server: MlxApi(server, "org/model", Tokenizer()),
}


@dataclass
class Made:
    engine: OutsideEngine
    folder: Path
    written: list[tuple[AdapterRef, str]]


def make(kind: str, url: str, folder: Path, own: Callable[[int], float] = lambda token: -1.0, key: str = "") -> Made:
    """`own`: the logprob that the model here gives a token."""
    server = EngineServer(kind, url, key, timeout_s=5)
    api = APIS[kind](server)
    written: list[tuple[AdapterRef, str]] = []

    async def write(ref: AdapterRef, at: Path, form: str) -> None:
        at.mkdir(parents=True)
        written.append((ref, form))

    async def score(prompt: Any, completion: Any, ref: AdapterRef) -> list[float]:
        return [own(token) for token in completion]

    sync = AdapterSync(api, folder, write)
    text_of = lambda prompt, ids: Tokenizer().decode(token for token in ids if token != EOS)  # noqa: E731
    return Made(
        OutsideEngine(server, api, sync, text_of, frozenset({EOS}), Tokenizer.vocab_size, PROMPT, score),
        folder,
        written,
    )


async def answered(engine: OutsideEngine, request: GenerationRequest = REQUEST) -> list[Any]:
    return [event async for event in engine.generate(request)]
