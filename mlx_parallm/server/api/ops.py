"""Routes for operators: `/health`, `/liveness`, `/ready`, `/version`, `/metrics`, `/server_info`, `/debug/state`, and
`/docs`; and `/get_world_size`, which trainers ask for."""

from __future__ import annotations

import platform
from dataclasses import asdict, fields, replace
from importlib.metadata import version as version_of
from importlib.resources import files
from typing import Annotated, Any, Literal

from fastapi import Query
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from mlx_parallm import __version__
from mlx_parallm.config import Mode
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.engine.figures import EngineStats
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.bodies import MAX_SEQUENCES
from mlx_parallm.server.api.fields import WireOutput, WireQuery
from mlx_parallm.server.api.schedule import ModeName, mode_of, schedule_object
from mlx_parallm.server.errors import NotReadyError
from mlx_parallm.server.request import used_defaults
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

ServerMode = Literal["inference_only", "training_only"] | ModeName

router = Router()


# -- probes and metrics ----------------------------------------------------------------------------


class ProbeStatus(WireOutput):
    """The answer of a probe that succeeds."""

    status: str
    """`ok` or `ready`."""
    notices: tuple[str, ...] = ()
    """What the server does about short memory, and why; left out if nothing."""


class ServerVersion(WireOutput):
    """The server's version."""

    version: str
    """The version of the package mlx_parallm."""


class WorldSize(WireOutput):
    """The processes that hold the model."""

    world_size: int
    """Always 1."""


@router.get("/health", role=None, response_model_exclude_unset=True)
async def health(services: ServicesDep) -> ProbeStatus:
    """Whether the server works: 503 if the device thread, which runs the model, has stopped or seems to hang."""
    stats = services.engine.stats()
    stats.check_works()
    text = stats.machine.relief_text
    return ProbeStatus(status="ok", notices=(text,)) if text else ProbeStatus(status="ok")


@router.get("/liveness", role=None, response_model_exclude_unset=True)
async def liveness() -> ProbeStatus:
    """Whether the HTTP server answers. `/health` says whether the engine works too."""
    return ProbeStatus(status="ok")


@router.get("/ready", role=None, response_model_exclude_unset=True)
async def ready(services: ServicesDep) -> ProbeStatus:
    """Whether generation requests are accepted now; if not, 503. A server that sleeps, or only trains, is not ready."""
    services.check_open()
    if not services.engine.stats().ready:
        raise NotReadyError("the engine is not ready")
    return ProbeStatus(status="ready")


@router.get("/version", role=Role.INFERENCE)
async def version() -> ServerVersion:
    """The server's version."""
    return ServerVersion(version=__version__)


@router.get("/get_world_size", role=Role.INFERENCE)
async def get_world_size() -> WorldSize:
    """The number of processes that hold the model."""
    return WorldSize(world_size=1)


@router.get(
    "/metrics",
    role=Role.INFERENCE,
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(services: ServicesDep) -> Response:
    """Metrics in Prometheus's text format."""
    return Response(services.metrics.exposition(services.key), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


# -- server info -----------------------------------------------------------------------------------

PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "llguidance", "fastapi", "pydantic", "uvicorn")


class ServerInfoQuery(WireQuery):
    """vLLM's parameter of `/server_info`."""

    config_format: Literal["json"] = "json"
    """Only `json`; vLLM has a text form too."""


class ServerLimits(WireOutput):
    """The limits of this server."""

    max_batch_size: int
    """Maximum number of sequences in one batch."""
    max_queued: int
    """Maximum number of sequences that wait while the batch is full."""
    max_sequences_per_request: int
    """Maximum number of sequences of one request that generates, which is `n` times its prompts."""
    max_body_bytes: int
    """Maximum number of bytes of a request's body."""
    kv_cache_bytes: int
    """Memory budget of the KV pool, in bytes."""
    adapter_slots: int
    """Maximum number of adapter versions in one batch."""


class VLLMConfig(WireOutput):
    """What TRL reads of vLLM's configuration."""

    served_model: Annotated[dict[str, str], Field(serialization_alias="model_config")]
    """`dtype`: the type of the activations, written as PyTorch does, such as `torch.float32`."""
    lora_config: dict[str, int]
    """`max_lora_rank`, and `max_loras`, the adapter versions that requests in one batch may use."""
    parallel_config: dict[str, int]
    """`data_parallel_size`: always 1."""
    weight_transfer_config: None
    """Always null: no weights of a whole model are taken."""


class ServerInfo(WireOutput):
    """Model, versions, limits and state of this server. Keys are not shown."""

    version: str
    """The version of the package mlx_parallm."""
    versions: dict[str, str]
    """Versions of Python and of the main packages, by name."""
    system: str
    """Operating system and processor."""
    model: ModelCard
    """The base model that is served."""
    limits: ServerLimits
    """The limits in force."""
    vllm_config: VLLMConfig
    """Some of these facts where TRL looks for them."""
    mode: ServerMode
    """How inference and training share device time now. `custom`: training has a share that no mode has."""
    paused: bool
    """True from `/pause` to `/resume`."""
    asleep: bool
    """True while completions are refused because of `/sleep`."""
    draining: bool
    """True once the server is shutting down."""
    inference: bool
    """Whether it accepts generation requests. false: it only trains."""
    training: bool
    """Whether it trains."""


@router.get("/server_info", role=Role.INFERENCE)
async def server_info(services: ServicesDep, _: Annotated[ServerInfoQuery, Query()]) -> ServerInfo:
    """Model, versions, limits and state."""
    config, stats, adapters = services.config, services.engine.stats(), services.adapters.stats()
    return ServerInfo(
        version=__version__,
        versions={"python": platform.python_version(), **{package: version_of(package) for package in PACKAGES}},
        system=f"{platform.system()} {platform.machine()}",
        model=_model_info(services),
        limits=ServerLimits(
            max_batch_size=config.max_batch_size,
            max_queued=config.max_queued,
            max_sequences_per_request=MAX_SEQUENCES,
            max_body_bytes=config.max_body_bytes,
            kv_cache_bytes=stats.kv_bytes_budget,
            adapter_slots=adapters.slots,
        ),
        vllm_config=VLLMConfig(
            served_model={"dtype": f"torch.{services.models.first.card.dtype}"},
            lora_config={"max_lora_rank": adapters.max_rank, "max_loras": adapters.slots},
            parallel_config={"data_parallel_size": 1},
            weight_transfer_config=None,
        ),
        mode=server_mode(services),
        paused=stats.paused,
        asleep=services.lifecycle.asleep,
        draining=services.lifecycle.drain_begun.is_set(),
        inference=config.mode is not Mode.TRAINING_ONLY,
        training=services.training is not None,
    )


def _model_info(services: Services) -> ModelCard:
    card = services.models.first.card
    defaults = dict(used_defaults(card, services.config))
    return replace(card, tokenizer=services.path(card.tokenizer), generation_defaults=defaults)


def server_mode(services: Services) -> ServerMode:
    """How inference and training share device time now."""
    if services.config.mode is Mode.TRAINING_ONLY:
        return "training_only"
    if services.training is None:
        return "inference_only"
    return mode_of(services.engine.stats().schedule)


# -- debug state -----------------------------------------------------------------------------------


class DebugState(WireOutput):
    """The state of engine and server, for people to read."""

    engine: dict[str, Any]
    """The engine's figures: queues, rows of the batch, KV pool, memory."""
    server: dict[str, Any]
    """The HTTP server's state and queue."""
    model: dict[str, Any]
    """The base model."""


@router.get("/debug/state", role=Role.ADMIN)
async def debug_state(services: ServicesDep) -> DebugState:
    """The state of engine and server: queues, rows of the batch, KV pool and memory."""
    stats = services.engine.stats()
    return DebugState(
        engine=_engine_state(stats),
        server={
            "sequences_held": services.gate.held,
            "sequences_limit": services.gate.limit,
            "mode": server_mode(services),
            "draining": services.lifecycle.drain_begun.is_set(),
            "asleep": services.lifecycle.asleep,
            "paused": stats.paused,
            "started_at": services.started_at,
        },
        model=asdict(services.models.first.card),
    )


def _engine_state(stats: EngineStats) -> dict[str, Any]:
    """The figures of `stats`. Not `asdict`: it copies `detail` with deepcopy, which fails on read-only mappings."""
    state = {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "bases"}
    return state | {"schedule": schedule_object(stats).model_dump(), "detail": dict(stats.detail)}


# -- documentation ---------------------------------------------------------------------------------

DOCS_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",  # with it, what the page asks for shows that the page asked
}


@router.get("/openapi.json", role=Role.INFERENCE, include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.get("/docs", role=Role.INFERENCE, include_in_schema=False)
async def docs() -> HTMLResponse:
    """A page that shows `/openapi.json`. It loads nothing from other servers."""
    page = files("mlx_parallm.server").joinpath("docs.html").read_text("utf-8")
    return HTMLResponse(page, headers=DOCS_HEADERS)
