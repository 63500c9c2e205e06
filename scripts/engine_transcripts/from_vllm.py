# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "fastapi>=0.120", "httpx>=0.28", "pydantic>=2.12", "numpy>=2", "msgspec", "openai>=2", "regex", "cloudpickle",
#     "psutil", "pyyaml", "aiohttp", "requests", "packaging", "prometheus-client", "opentelemetry-api",
# ]
# ///
"""Writes tests/extras/engines/transcripts/vllm.json from a published wheel of vLLM, unpacked and not installed.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-*.whl -d vllm-unpacked
    uv run --script scripts/engine_transcripts/from_vllm.py vllm-unpacked

The routes, request classes, sampling parameters and answer builders are vLLM's. The engine behind them is made up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from recording import (
    COMPLETIONS,
    DRAWN,
    GONE,
    LOAD,
    LORA,
    MODEL,
    PROMPT,
    Recording,
    Request,
    text_of,
    unpacked,
    version_of,
)
from stand_ins import StandIns

os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
FOLDER = unpacked("vllm")
STAND_INS = StandIns("vllm._C")

from vllm.entrypoints.openai.completion import api_router as completion_routes  # noqa: E402
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: E402
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion  # noqa: E402
from vllm.entrypoints.openai.models import api_router as model_routes  # noqa: E402
from vllm.entrypoints.openai.models.protocol import BaseModelPath  # noqa: E402
from vllm.entrypoints.openai.models.serving import OpenAIServingModels  # noqa: E402
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler  # noqa: E402
from vllm.entrypoints.serve.lora import api_router as lora_routes  # noqa: E402
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest  # noqa: E402
from vllm.exceptions import LoRAAdapterNotFoundError  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.logprobs import Logprob  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

MADE_FROM = [
    "vllm.entrypoints.openai.completion: api_router, CompletionRequest, OpenAIServingCompletion, CompletionResponse",
    "vllm.entrypoints.openai.models: api_router, OpenAIServingModels",
    "vllm.entrypoints.serve.lora: api_router, LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest",
    "vllm.entrypoints.serve.exception_handling, vllm.sampling_params.SamplingParams, vllm.outputs, vllm.logprobs",
]


class ModelSettings(SimpleNamespace):
    def get_diff_sampling_param(self) -> dict[str, Any]:
        return {}


class MadeUpEngine:
    """In place of vLLM's engine: it answers every prompt with `DRAWN`, and has no adapter in `FOLDER/GONE`."""

    errored = False
    vllm_config = None
    input_processor = None
    renderer = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda token: text_of([token])))
    model_config = ModelSettings(
        max_model_len=4096, generation_config="vllm", is_encoder_decoder=False, model=MODEL, max_logprobs=20
    )

    def check_admission(self, sequences: int) -> None:
        pass

    async def add_lora(self, lora: Any) -> bool:
        if lora.lora_path == GONE["lora_path"]:
            raise LoRAAdapterNotFoundError(lora.lora_name, lora.lora_path)
        return True

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> AsyncIterator[Any]:
        assert params.logprobs == 0, "only the drawn token's logprob"
        outputs = [
            CompletionOutput(
                index=index,
                text=text_of(ids),
                token_ids=ids,
                cumulative_logprob=sum(values),
                logprobs=[{one: Logprob(value, 1, text_of([one]))} for one, value in zip(ids, values, strict=True)],
                finish_reason=reason,
            )
            for index, (ids, values, reason) in enumerate(DRAWN[: params.n])
        ]
        yield RequestOutput(request_id, None, list(prompt["prompt_token_ids"]), None, outputs, finished=True)


async def rendered(request: CompletionRequest) -> list[Any]:
    return [tokens_input(request.prompt)]


def served(lora: bool = True) -> FastAPI:
    """vLLM's routes. `lora`: with VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    app, engine = FastAPI(), MadeUpEngine()
    app.state.openai_serving_models = models = OpenAIServingModels(engine, [BaseModelPath(MODEL, MODEL)])
    renderer = SimpleNamespace(render_completion=rendered)
    app.state.openai_serving_completion = OpenAIServingCompletion(
        engine, models, online_renderer=renderer, request_logger=None
    )
    model_routes.attach_router(app)
    completion_routes.attach_router(app)
    if lora:
        lora_routes.attach_router(app)
    init_exception_handler(app)
    return app


def draw(model: str, **other: Any) -> Request:
    body = {
        **{"model": model, "prompt": PROMPT, "n": 2, "max_tokens": 3, "temperature": 1.0, "seed": 40, "logprobs": 0},
        **{"return_token_ids": True, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    }
    return COMPLETIONS, body | other


async def main() -> None:
    made_up = "Its engine is made up: the tokens, their texts and their logprobs."
    recording = Recording("vllm", version_of(FOLDER, "vllm"), MADE_FROM, made_up)
    await recording.lora_scenes(served, draw)
    await recording.scene("loaded twice", served(), (LOAD, LORA), (LOAD, LORA))
    await recording.scene("unknown model", served(), draw("NAME"))
    recording.write_lora_scenes(CompletionRequest, LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest, STAND_INS.used)


if __name__ == "__main__":
    asyncio.run(main())
