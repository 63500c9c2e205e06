# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "fastapi>=0.120", "httpx>=0.28", "pydantic>=2.12", "pydantic-settings", "numpy>=2", "msgspec", "openai>=2",
#     "sse-starlette", "prometheus-client", "psutil", "pyyaml", "aiohttp", "requests", "opentelemetry-sdk",
#     "opentelemetry-exporter-prometheus", "opentelemetry-exporter-otlp-proto-http", "cloudpickle", "regex",
#     "packaging",
# ]
# ///
"""Writes tests/extras/engines/transcripts/max.json from a published wheel of MAX, which is unpacked and not installed.

    pip download --no-deps max==26.7.0 && unzip -q max-*.whl -d max-unpacked
    uv run --script scripts/engine_transcripts/from_max.py max-unpacked

The routes, request classes and answer builders are MAX's. The model and the LoRA manager behind them are made up.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import openai  # noqa: F401  (before StandIns, so that its optional modules stay away)
from fastapi import FastAPI, HTTPException
from recording import (
    COMPLETIONS,
    DRAWN,
    GONE,
    LOAD,
    LORA,
    MODEL,
    MODELS,
    PROMPT,
    Recording,
    Request,
    text_of,
    unpacked,
    version_of,
)
from stand_ins import StandIns

FOLDER = unpacked("max")
COMPILED = ("max._core", "max._kv_core", "max._mlir", "max._mlir_context")
DEVICE = ("max.driver", "max.dtype", "max.engine", "max.experimental", "max.graph", "max.nn")
STAND_INS = StandIns(*COMPILED, *DEVICE, "max.pipelines.architectures")

from max.pipelines.context import GenerationStatus  # noqa: E402
from max.pipelines.context.sampling_params import SamplingParamsGenerationConfigDefaults  # noqa: E402
from max.pipelines.lib import PipelineConfig  # noqa: E402
from max.pipelines.lora import LoRAOperation, LoRAStatus  # noqa: E402
from max.serve.api_server import _openai_http_exception_handler  # noqa: E402
from max.serve.pipelines.echo_gen import EchoPipelineTokenizer  # noqa: E402
from max.serve.pipelines.llm import TokenGeneratorOutput  # noqa: E402
from max.serve.request import register_request  # noqa: E402
from max.serve.router import openai_routes  # noqa: E402
from max.serve.schemas.openai import CreateCompletionRequest, LoadLoraRequest, UnloadLoraRequest  # noqa: E402
from max.serve.worker_interface.lora_request_processor import LoRARequestProcessor  # noqa: E402

MADE_FROM = [
    "max.serve.router.openai_routes: router, OpenAICompletionResponseGenerator",
    "max.serve.schemas.openai: CreateCompletionRequest, CreateCompletionResponse, LoadLoraRequest, UnloadLoraRequest",
    "max.serve.worker_interface.lora_request_processor: LoRARequestProcessor",
    "max.serve.api_server: exception handler; max.serve.request: register_request",
    "max.serve.pipelines.llm: TokenGeneratorOutput",
]


class MadeUpLoras:
    """In place of MAX's LoRA queue and manager. The answers are those of MAX's own LoRARequestProcessor."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}
        self._processor = object.__new__(LoRARequestProcessor)  # without its sockets
        self._processor.manager = self

    def list_loras(self) -> list[str]:
        return list(self._paths)

    async def get_response(self, request_id: Any, request: Any) -> Any:
        assert isinstance(request.operation, LoRAOperation)
        return self._processor._handle_lora_request(request)

    def load_adapter(self, spec: str) -> LoRAStatus:
        name, _, path = spec.partition("=")
        if path == GONE["lora_path"]:
            return LoRAStatus.LOAD_INVALID_PATH
        if self._paths.setdefault(name, path) != path:
            return LoRAStatus.LOAD_NAME_EXISTS
        return LoRAStatus.SUCCESS

    def unload_adapter(self, name: str) -> LoRAStatus:
        return LoRAStatus.SUCCESS if self._paths.pop(name, None) else LoRAStatus.UNLOAD_NAME_NONEXISTENT


class MadeUpPipeline:
    """In place of MAX's token generator: it answers the n-th prompt of a request with the n-th entry of `DRAWN`."""

    model_name = MODEL
    tokenizer = EchoPipelineTokenizer()

    def __init__(self, lora: bool) -> None:
        self.lora_queue = MadeUpLoras() if lora else None

    async def all_tokens(self, request: Any, *, parse_reasoning: bool) -> list[TokenGeneratorOutput]:
        assert request.logprobs == 1, "the drawn token's logprob, and that of the most likely one"
        assert not parse_reasoning, "a parser would take tokens away from the logprobs"
        ids, values, reason = DRAWN[int(str(request.request_id).rpartition("_")[2])]
        status = {"length": GenerationStatus.MAXIMUM_LENGTH, "stop": GenerationStatus.END_OF_SEQUENCE}[reason]
        chunk = TokenGeneratorOutput(
            status=status,
            decoded_tokens=text_of(ids),
            token_count=len(ids),
            token_log_probabilities=list(values),
            top_log_probabilities=[{one: (text_of([one]), value)} for one, value in zip(ids, values, strict=True)],
            sampled_tokens=[text_of([one]) for one in ids],
            prompt_token_count=len(request.prompt),
            cached_token_count=0,
            reasoning_token_count=0,
            token_ids=list(ids),
            prompt_token_ids=list(request.prompt),
        )
        return [chunk]


def served(lora: bool = True, overlap: bool = False) -> FastAPI:
    """MAX's routes. `lora`: with --enable-lora. `overlap`: without --no-enable-overlap-scheduler."""
    app = FastAPI()
    app.state.pipeline = MadeUpPipeline(lora)
    app.state.memory_plan = SimpleNamespace(planned_max_length=4096)
    app.state.settings = SimpleNamespace(use_client_cache_salt=False)
    runtime = SimpleNamespace(
        allow_extra_request_fields=False, enable_overlap_scheduler=overlap, allow_unsupported_logprobs=False,
        temperature=None, top_k=None, thinking_temperature=None,
    )  # fmt: skip
    model = SimpleNamespace(sampling_params_defaults=SamplingParamsGenerationConfigDefaults())
    app.state.pipeline_config = config = object.__new__(PipelineConfig)  # its fields are read, nothing is resolved
    vars(config).update(runtime=runtime, models=None, speculative=None)
    type(config).model = property(lambda self: model)
    app.include_router(openai_routes.router)
    register_request(app)
    app.add_exception_handler(HTTPException, _openai_http_exception_handler)
    return app


def draw(model: str, **other: Any) -> Request:
    body = {
        **{"model": model, "prompt": [PROMPT, PROMPT], "max_tokens": 3, "temperature": 1.0, "logprobs": 1},
        **{"return_token_ids": True, "reasoning_split": False},
        **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    }
    return COMPLETIONS, body | other


async def main() -> None:
    made_up = "Its model and its LoRA manager are made up: the tokens, their texts and their logprobs."
    recording = Recording("max", version_of(FOLDER, "max"), MADE_FROM, made_up)
    await recording.lora_scenes(served, draw)
    await recording.scene("no logprobs", served(overlap=True), MODELS, (LOAD, LORA), draw("NAME"))
    await recording.scene("unknown field", served(), draw(MODEL, unknown=1))
    recording.write_lora_scenes(CreateCompletionRequest, LoadLoraRequest, UnloadLoraRequest, STAND_INS.used)


if __name__ == "__main__":
    asyncio.run(main())
