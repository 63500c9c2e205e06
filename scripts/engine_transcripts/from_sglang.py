# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "fastapi>=0.120", "httpx>=0.28", "pydantic>=2.12", "numpy>=2", "msgspec", "orjson", "openai>=2", "aiohttp",
#     "requests", "uvloop", "uvicorn", "psutil", "prometheus-client", "packaging", "pyyaml", "cloudpickle", "regex",
# ]
# ///
"""Writes tests/extras/engines/transcripts/sglang.json from a published wheel of SGLang, unpacked and not installed.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-*.whl -d sglang-unpacked
    uv run --script scripts/engine_transcripts/from_sglang.py sglang-unpacked

The routes, request classes, JSON contract and tokenizer manager, which builds the answers, are SGLang's. The scheduler
behind them is made up.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from types import SimpleNamespace
from typing import Any

import openai  # noqa: F401  (before StandIns, so that its optional modules stay away)
import uvloop  # noqa: F401
from fastapi import FastAPI
from pydantic import TypeAdapter
from recording import DRAWN, GONE, LORA, MODEL, PROMPT, Recording, text_of, unpacked, version_of
from stand_ins import StandIns

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # /health draws no token to see whether it can
FOLDER = unpacked("sglang")
ON_DEVICE = ("kernels", "srt.configs", "srt.distributed", "srt.layers", "srt.model_executor", "srt.models")
PATCHES = ("srt.multimodal", "srt.utils.hf_transformers_patches")
STAND_INS = StandIns(*(f"sglang.{name}" for name in (*ON_DEVICE, *PATCHES)))

from sglang.srt.entrypoints import http_server  # noqa: E402
from sglang.srt.lora.lora_registry import LoRARegistry  # noqa: E402
from sglang.srt.managers import tokenizer_control_mixin, tokenizer_manager  # noqa: E402
from sglang.srt.managers.io_struct import BatchStrOutput, GenerateReqInput, LoRAUpdateOutput  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

MADE_FROM = [
    "sglang.srt.entrypoints.http_server: app; sglang.api.v1.api_types: GenerateRequest (the JSON contract)",
    "sglang.srt.managers.tokenizer_manager: TokenizerManager; sglang.srt.managers.tokenizer_control_mixin",
    "sglang.srt.managers.io_struct: GenerateReqInput, LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput, "
    "LoRAUpdateOutput, BatchStrOutput",
    "sglang.srt.sampling.sampling_params: SamplingParams; sglang.srt.lora.lora_registry: LoRARegistry",
]
LORA_SETTINGS = SimpleNamespace(enable_lora=True, max_loaded_loras=None, lora_paths=None)


class MadeUpScheduler(tokenizer_manager.TokenizerManager):
    """SGLang's tokenizer manager on a made-up scheduler: each sample is the next entry of `DRAWN`."""

    def __init__(self) -> None:
        self.rid_to_state, self._lora_release_tasks = {}, set()
        self.lora_registry, self.lora_ref_cache, self.pending_lora_unloads = LoRARegistry(None), {}, {}
        self.lora_update_lock, self.is_pause_cond, self.is_pause = asyncio.Lock(), asyncio.Condition(), False
        self.model_update_lock = tokenizer_manager.RWLock()
        self.request_logger = SimpleNamespace(log_received_request=_nothing, log_finished_request=_nothing)
        self.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
        self.encoder_dispatch_ready = {}
        self.enable_lora = LORA_SETTINGS.enable_lora
        self.enable_priority_scheduling = self.enable_trace = self.enable_metrics = self.skip_tokenizer_init = False
        self.disaggregation_mode = tokenizer_manager.DisaggregationMode.NULL
        self.tokenizer = self.dump_requests_folder = self.crash_dump_folder = None
        self.gracefully_exit, self._server_status = False, tokenizer_manager.ServerStatus.Up
        self.served_model_name, self.model_config = MODEL, SimpleNamespace(context_len=4096)
        self.incremental_streaming_output = False
        self.update_lora_adapter_communicator = self._updated
        self._samples = iter(DRAWN)
        self._paths: dict[str, str] = {}

    def auto_create_handle_loop(self) -> None:
        pass

    def config_value(self, name: str) -> Any:
        return {"weight_version": "default"}[name]

    async def _updated(self, request: Any) -> list[LoRAUpdateOutput]:
        """What the scheduler answers to a request to load or unload an adapter."""
        if type(request).__name__.startswith("Unload"):
            self._paths.pop(request.lora_name, None)
        elif request.lora_path == GONE["lora_path"]:
            error = f"Can't find 'adapter_config.json' at '{request.lora_path}'"
            return [LoRAUpdateOutput(success=False, error_message=error, loaded_adapters=dict(self._paths))]
        else:
            self._paths[request.lora_name] = request.lora_path
        return [LoRAUpdateOutput(success=True, loaded_adapters=dict(self._paths))]

    async def _tokenize_one_request(self, obj: Any) -> Any:
        params = SamplingParams(**obj.sampling_params)
        params.normalize(None)
        params.verify(vocab_size=100)
        return SimpleNamespace(sampling_params=params, input_ids=obj.input_ids, rid=obj.rid, time_stats=None)

    async def _send_one_request(self, request: Any) -> None:
        asyncio.get_running_loop().create_task(self._handle_batch_output(self._output(request)))

    def _output(self, request: Any) -> BatchStrOutput:
        warming_up = request.sampling_params.max_new_tokens == 0
        ids, values, reason = ((), (), "length") if warming_up else next(self._samples)
        ended = {"type": "length", "length": len(ids)} if reason == "length" else {"type": "stop", "matched": ids[-1]}
        fields = dict.fromkeys(BatchStrOutput.__struct_fields__)
        return BatchStrOutput(**fields | {
            "rids": [request.rid], "finished_reasons": [ended], "output_strs": [text_of(ids)],
            "output_ids": [array("q", ids)], "prompt_tokens": [len(request.input_ids)],
            "completion_tokens": [len(ids)], "reasoning_tokens": [0], "cached_tokens": [0], "retraction_counts": [0],
            "output_token_logprobs_val": [list(values)], "output_token_logprobs_idx": [list(ids)],
        })  # fmt: skip


def _nothing(*_: Any, **__: Any) -> None:
    pass


def served(lora: bool = True) -> FastAPI:
    """SGLang's routes. `lora`: with --enable-lora."""
    LORA_SETTINGS.enable_lora = lora
    settings = {
        "get_lora": LORA_SETTINGS,
        "get_serving": SimpleNamespace(batch_notify_size=16, enable_strict_thinking=False),
        "get_disagg": SimpleNamespace(language_only=False, disaggregation_mode="null"),
        "get_parallel": SimpleNamespace(dp_size=1, num_dp_ranks=1),
        "get_spec": SimpleNamespace(speculative_algorithm=None),
    }
    for module in (http_server, tokenizer_manager, tokenizer_control_mixin):
        for name, value in settings.items():
            if hasattr(module, name):
                setattr(module, name, lambda value=value: value)
    http_server.set_global_state(http_server._GlobalState(MadeUpScheduler(), None, None))
    return http_server.app


def draw(adapter: str | None, **other: Any) -> tuple[str, dict[str, Any]]:
    sampling = {
        **{"n": 2, "max_new_tokens": 3, "temperature": 1.0},
        **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    }
    lora = {"lora_path": adapter} if adapter else {}
    return "POST /generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **lora, **other}


async def main() -> None:
    made_up = "Its scheduler is made up: the tokens, their texts and their logprobs, and the reason why a load fails."
    recording = Recording("sglang", version_of(FOLDER, "sglang"), MADE_FROM, made_up)
    health, load, unload = "GET /health", "POST /load_lora_adapter", "POST /unload_lora_adapter"
    app = served()
    await recording.scene("draw", app, (health, None), (load, LORA), draw("NAME"), (unload, {"lora_name": "NAME"}))
    await recording.scene("base", served(), (health, None), draw(None))
    await recording.scene("no adapter there", served(), (health, None), (load, GONE))
    await recording.scene("unload unknown", served(), (unload, {"lora_name": "NAME"}))
    await recording.scene("unknown adapter", served(), draw("NAME"))
    await recording.scene("no lora", served(lora=False), (health, None), (load, LORA))
    recording.schemas = {"/generate": TypeAdapter(GenerateReqInput).json_schema()}
    recording.write(STAND_INS.used)


if __name__ == "__main__":
    asyncio.run(main())
