"""Builds the outside engine on which a training run samples."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from mlx_parallm.adapters.formats import FormatName
from mlx_parallm.app.build import Served
from mlx_parallm.config import Config, EngineKind, InferenceConfig, ModelConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import GenerationRequest, PromptScored, SamplingParams, StopParams, WorkClass
from mlx_parallm.extras.engines.api import EngineApi
from mlx_parallm.extras.engines.http import EngineServer
from mlx_parallm.extras.engines.max import MaxApi
from mlx_parallm.extras.engines.mlx import MlxApi
from mlx_parallm.extras.engines.openai import OpenAIApi, VllmApi
from mlx_parallm.extras.engines.outside import NEUTRAL, OutsideEngine
from mlx_parallm.extras.engines.sglang import SglangApi
from mlx_parallm.extras.engines.spread import SpreadEngine
from mlx_parallm.extras.engines.sync import AdapterSync, WriteAdapter
from mlx_parallm.model.tokenizer import detokenizer_for
from mlx_parallm.rl.rollouts.answers import InferenceEngine, events_of

_FOLDER = ".inference"
"""Folder of a run in which adapter versions wait for an outside engine."""

_PATIENCE_S = 120.0
"""How long a run samples again while its cluster fails, in seconds: a head may be starting again."""

_TRIAL = ({"role": "user", "content": "Hello"},)


def outside_engine(config: Config, served: Served, cluster: InferenceEngine | None) -> InferenceEngine:
    """The configured outside engine, whose server is not asked for anything yet. `cluster`: samples on the nodes of a
    cluster, of which an outside engine is one more."""
    outside = [_outside(config, served)] if config.inference.engine.outside else []
    return outside[0] if cluster is None else SpreadEngine([cluster, *outside], _PATIENCE_S)


def _outside(config: Config, served: Served) -> OutsideEngine:
    settings = config.inference
    assert settings.url is not None  # the section refuses an outside engine without one
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    server = EngineServer(settings.engine.value, settings.url, key, settings.timeout)
    api = _api(config, server, served)
    tokenizer = served.tokenizer
    detokenizer = detokenizer_for(tokenizer)

    def text_of(prompt: Sequence[int], completion: Sequence[int]) -> str:
        text = detokenizer(prompt, frozenset())
        return "".join([*map(text.add, completion), text.finish()])

    return OutsideEngine(
        server,
        api,
        AdapterSync(api, _adapter_folder(settings, served), _writer(config.model, served)),
        text_of,
        tokenizer.eos_token_ids,
        served.card.vocab_size,
        tokenizer.apply_chat_template(_TRIAL) if tokenizer.chat_template else tokenizer.encode("Hello"),
        _Scorer(served),
    )


def _api(config: Config, server: EngineServer, served: Served) -> EngineApi:
    settings = config.inference
    match settings.engine:
        case EngineKind.OPENAI:
            return OpenAIApi(server, settings.model)
        case EngineKind.VLLM:
            return VllmApi(server, settings.model)
        case EngineKind.SGLANG:
            return SglangApi(server)
        case EngineKind.MAX:
            return MaxApi(server, settings.model)
        case EngineKind.MLX:
            return MlxApi(server, settings.model or _model_name(config), served.tokenizer)
        case EngineKind.SHARED | EngineKind.NONE:
            raise AssertionError("it has no server")
        case _:
            assert_never(settings.engine)


def _model_name(config: Config) -> str:
    """The base model as mlx_lm.server is given it: a directory's whole path, or a hub id."""
    path = config.model.base_model_path or ""
    return str(Path(path).absolute()) if Path(path).is_dir() else path


def _adapter_folder(settings: InferenceConfig, served: Served) -> Path:
    if settings.adapter_dir is not None:
        return settings.adapter_dir
    assert served.run is not None  # a process that trains has a run
    folder = served.run.path / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # what a process that was killed has left
    return folder


def _writer(model: ModelConfig, served: Served) -> WriteAdapter:
    """Writes versions of the adapters here, and the neutral one, which is as large as those that training makes."""

    async def write(ref: AdapterRef, folder: Path, form: FormatName) -> None:
        if ref == NEUTRAL:
            await served.adapters.write_neutral(folder, form, model.lora_rank, model.lora_target_modules)
        else:
            await served.adapters.write(ref, folder, form)

    return write


class _Scorer:
    """Computes logprobs with this process's own engine."""

    def __init__(self, served: Served) -> None:
        self._engine = served.engine
        self._number = 0

    async def __call__(self, prompt: Sequence[int], completion: Sequence[int], adapter: AdapterRef) -> Sequence[float]:
        self._number += 1
        request = GenerationRequest(
            f"inference-trial-{self._number}",
            ((*prompt, *completion),),
            SamplingParams(),
            StopParams(max_tokens=0),
            prompt_logprobs=0,
            scored_from=len(prompt),
            adapter=adapter,
            work_class=WorkClass.TRAINING,
        )
        scored = [event async for event in events_of(self._engine.generate(request)) if isinstance(event, PromptScored)]
        last = scored[0].logprobs[len(prompt) :]
        return [token.logprob for token in last if token is not None]
