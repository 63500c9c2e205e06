"""OpenAI-compatible servers that take and return token ids, as vLLM does in `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mlx_parallm.adapters.formats import FormatName
from mlx_parallm.extras.engines.api import Draw, Sample, SentAdapter, sample_of
from mlx_parallm.extras.engines.http import EngineServer, EngineServerError

COMPLETIONS = "/v1/completions"
UNFILTERED: Mapping[str, float] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent in every request, because servers take other defaults from the model's generation_config.json."""


class OpenAIApi:
    """Any server with vLLM's `return_token_ids` in `/v1/completions`, such as this project's own.

    It takes a LoRA by `/v1/load_lora_adapter`, or by the same route at the root, where prime-rl has it.
    """

    adapter_format: ClassVar[FormatName] = "peft"
    logprobs_at_temperature: ClassVar[bool] = False
    ROUTES: ClassVar[Sequence[str]] = ("/v1", "")
    """Prefixes of the LoRA routes, in the order in which they are tried."""

    def __init__(self, server: EngineServer, model: str | None) -> None:
        self._server = server
        self._model = model

    async def connect(self) -> None:
        if self._model is None:
            self._model = await first_model(self._server)

    async def load(self, adapter: SentAdapter) -> None:
        await self._lora("load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.folder)})

    async def unload(self, adapter: SentAdapter) -> None:
        await self._lora("unload_lora_adapter", {"lora_name": adapter.name})

    async def _lora(self, action: str, body: dict[str, object]) -> None:
        for prefix in self.ROUTES:
            try:
                await self._server.post(f"{prefix}/{action}", body)
                return
            except EngineServerError as error:
                if not lacks_route(error, body) or prefix == self.ROUTES[-1]:
                    raise

    async def draw(self, draw: Draw, adapter: SentAdapter | None) -> list[Sample]:
        body = {
            "model": adapter.name if adapter else self._model,
            "prompt": list(draw.prompt_ids),
            "n": draw.n,
            "max_tokens": draw.max_tokens,
            "temperature": draw.temperature,
            "seed": draw.seed,
            "logprobs": 0,
            "return_token_ids": True,
            **UNFILTERED,
        }
        choices = choices_of(self._server, await self._server.post(COMPLETIONS, body), draw.n)
        return [sample_of(self._server, c.get("token_ids"), logprobs_of(c).get("token_logprobs")) for c in choices]


class VllmApi(OpenAIApi):
    """vLLM, started with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."""

    ROUTES = ("/v1",)

    async def load(self, adapter: SentAdapter) -> None:
        try:
            await super().load(adapter)
        except EngineServerError as error:
            if not lacks_route(error, {"lora_name": adapter.name}):
                raise
            needed = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            raise self._server.unusable(f"takes no LoRA while it runs: {needed}") from error


def lacks_route(error: EngineServerError, body: Mapping[str, object]) -> bool:
    """Whether the server has no such route for LoRAs. A route that exists also answers 404, about an adapter or a
    folder that it does not find; then it says which adapter."""
    return error.status in (404, 405) and str(body["lora_name"]) not in str(error)


async def first_model(server: EngineServer) -> str:
    """The name of the first model in `/v1/models`. Raises EngineServerError: it lists none."""
    answer = await server.get("/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise server.unusable("lists no model in /v1/models: name one with --inference-model") from error


def choices_of(server: EngineServer, answer: object, n: int) -> list[dict[str, Any]]:
    """The choices of a completion, by index. Raises EngineServerError: there are not `n` of them."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise server.unusable(f"answered {COMPLETIONS} without choices")
    if len(choices) != n:
        raise server.unusable(f"gave {len(choices)} answers to a request for {n}")
    return sorted(choices, key=_index_of)


def _index_of(choice: Mapping[str, Any]) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else 0


def logprobs_of(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object `logprobs` of a choice; empty if there is none."""
    found = choice.get("logprobs")
    return found if isinstance(found, dict) else {}
