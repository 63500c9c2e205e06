"""`/v1/cluster` and the routes below it, by which the nodes of a cluster work together, with their bodies. All but the
first want the token of the cluster as `Authorization: Bearer <token>`, whether or not the server requires API keys.
Only the first is in the OpenAPI document, because the others are for nodes of the same version."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal, cast

from fastapi import Depends, Header, Path
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.grammar import Grammar
from mlx_parallm.core.json_values import NOT_SENT, fields_of
from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.requests import Event, RequestFailed, RequestFinished
from mlx_parallm.errors import ConflictError, ContextLengthError, ParaLLMError
from mlx_parallm.extras.cluster.cards import ClusterStatus, Joined, Joining, NodeInfo, NodeRole, SharedVersion
from mlx_parallm.extras.cluster.http.parts import ClusterParts
from mlx_parallm.extras.cluster.http.remote import GENERATE, SAMPLE
from mlx_parallm.extras.cluster.http.router import RoutingCounts
from mlx_parallm.extras.cluster.http.wire import BEAT, BEAT_S, WireClock, WireEvent, WireRequest
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import INT32_MAX, WireInput, WireOutput
from mlx_parallm.server.body import json_body, read_body, read_bytes
from mlx_parallm.server.entry import sent_keys
from mlx_parallm.server.errors import ApiKeyError
from mlx_parallm.server.request_log import client_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep
from mlx_parallm.server.streams import while_connected

_HEADERS = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class EngineResponse(Response):
    """Holds places in the queue and the adapter version while the engine answers. Ends the request if the head closes
    the connection.

    Args:
        engine: this node's own.
    """

    def __init__(self, services: Services, engine: EngineClient, asked: WireRequest) -> None:
        super().__init__()
        self._services = services
        self._engine = engine
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request.

        Raises:
            DrainingError, InferenceDisabledError, AsleepError, OverloadedError: the request is not accepted now.
            UnknownModelError: this node does not hold the version.
            ContextLengthError: this node has less memory for contexts than the head.
        """
        services, asked = self._services, self._asked
        services.check_open()
        async with AsyncExitStack() as held:
            held.enter_context(services.gate.reserve(len(asked.prompts) * asked.n))
            model = await held.enter_async_context(services.models.use(services.models.first.card.name))
            selector = BASE_ADAPTER.name if asked.adapter == BASE_ADAPTER else str(asked.adapter)
            held.enter_context(services.adapters.lease(selector))
            _check_fits(asked, model.card.context_length)
            await self._send(model, scope, receive, send)

    async def _grammar(self, model: ServedModel, scope: Scope) -> Grammar | None:
        spec = self._asked.grammar
        if spec is None:
            return None
        compiled = partial(model.grammars.compile, spec)
        return await self._services.workers.compile(client_of(scope), len(spec.source), compiled)

    async def _send(self, model: ServedModel, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        clock = WireClock(clock=time.monotonic()).model_dump_json().encode() + b"\n"
        await send({"type": "http.response.body", "body": clock, "more_body": True})
        try:
            async with while_connected(receive, self._services.lifecycle.expired), _beating(send):
                generated = self._engine.generate(self._asked.request(await self._grammar(model, scope)))
                async with aclosing(cast(AsyncGenerator[Event, None], generated)) as events:
                    async for event in events:
                        await send({"type": "http.response.body", "body": WireEvent.line(event), "more_body": True})
                        if isinstance(event, RequestFinished | RequestFailed):
                            break
        except ClientDisconnect:
            return
        except ParaLLMError as error:  # the status line has been sent
            line = WireEvent.line(RequestFailed(error))
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def _beating(send: Send) -> AsyncIterator[None]:
    """Sends an empty line each `BEAT_S` until the block ends, which shows that this node can still be reached."""

    async def beat() -> None:
        with suppress(OSError):  # the one who asked has gone
            while True:
                await asyncio.sleep(BEAT_S)
                await send({"type": "http.response.body", "body": BEAT, "more_body": True})

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()


def _check_fits(asked: WireRequest, context_length: int) -> None:
    needed = max(map(len, asked.prompts)) + asked.stopping.max_tokens
    if needed > context_length:
        raise ContextLengthError(f"the request needs {needed} tokens, and this node has room for {context_length}")


class JoinBody(WireInput):
    """What a node says when it joins."""

    role: Literal["replica", "trainer"]
    """What the node is for."""
    url: str
    """Where the other nodes reach its HTTP server; empty if it has none."""
    fingerprint: str | None = None
    """That of its base model; null asks which one there is."""
    version: str
    """The version of its package."""

    def joining(self) -> Joining:
        """The same for `Node.join`."""
        return Joining(NodeRole(self.role), self.url, self.fingerprint, self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionObject(SharedVersion):
    """A shared adapter version."""

    live: bool
    """Whether the name means this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObject(NodeInfo):
    """A node that is present."""

    incarnation: str = field(metadata=NOT_SENT)
    build: str = field(metadata=NOT_SENT)
    requests: int
    """Requests that the head has sent it. 0 in the answers of other nodes."""

    @classmethod
    def of(cls, node: NodeInfo, counts: RoutingCounts, sees: Callable[[str], bool]) -> NodeObject:
        """The node as it describes itself, with the adapters that a reader may know of."""
        holds = tuple(version for version in node.holds if sees(version.partition("@")[0]))
        return cls(**fields_of(replace(node, holds=holds)), requests=counts.requests[node.id])


class ClusterObject(WireOutput):
    """A cluster as one of its nodes sees it."""

    object: Literal["cluster"]
    node: str
    """The id of that node."""
    connected: bool
    """Whether it is connected to NATS."""
    nodes: list[NodeObject]
    """The nodes that are present."""
    versions: list[VersionObject]
    """The shared adapter versions."""
    unusable: dict[str, str]
    """Shared versions that this node cannot serve, with the reason."""
    waiting: dict[str, int]
    """Requests whose answers wait for the trainer of an adapter, by its name."""
    nodes_lost: int
    """Nodes that fell silent since this one was started."""
    requests_retried: int
    """Requests that the head began anew on another node."""
    streams_broken: int
    """Streams that ended with an error because their node was lost."""

    @classmethod
    def of(cls, status: ClusterStatus, counts: RoutingCounts, sees: Callable[[str], bool]) -> ClusterObject:
        """The cluster with what the router has counted. `sees`: whether the reader may know of an adapter."""
        staged = sorted(status.versions.staged.values(), key=lambda version: (version.name, version.version))
        live = {version.ref for version in status.versions.live.values()}
        return cls(
            object="cluster",
            node=status.node_id,
            connected=status.connected,
            nodes=[NodeObject.of(node, counts, sees) for node in status.nodes],
            versions=[
                VersionObject(**fields_of(version), live=version.ref in live)
                for version in staged
                if sees(version.name)
            ],
            unusable={name: why for name, why in status.unusable.items() if sees(name.partition("@")[0])},
            waiting={name: count for name, count in status.waiting.items() if sees(name)},
            nodes_lost=status.lost_total,
            requests_retried=counts.retried,
            streams_broken=counts.broken,
        )


MAX_ARCHIVE_BYTES = 1 << 30
ARCHIVE_TIMEOUT_S = 600.0
"""The largest archive of an adapter, and the time that it may take to arrive."""

router = Router()


class LargeFile(FileResponse):
    """A file that is sent in few, large parts: each costs the event loop about as much, whatever its size."""

    chunk_size = 1 << 20


async def cluster_of(services: ServicesDep) -> ClusterParts:
    if services.cluster is None:
        raise ConflictError("This server is not a node of a cluster; start it with --share-model or --connect-to.")
    return services.cluster


ClusterDep = Annotated[ClusterParts, Depends(cluster_of)]


async def cluster_for_nodes(request: Request, cluster: ClusterDep) -> ClusterParts:
    """The cluster, for requests that have its token."""
    sent = sent_keys(request.scope)
    key = sent.pop() if len(sent) == 1 else b""
    if not hmac.compare_digest(key, cluster.client.token.encode()):
        raise ApiKeyError("Send the token of the cluster as `Authorization: Bearer <token>`; it is missing or wrong.")
    return cluster


NodesDep = Annotated[ClusterParts, Depends(cluster_for_nodes)]
Name = Annotated[str, Path(description="The name of an adapter.")]
Number = Annotated[int, Path(ge=0, le=INT32_MAX, description="The number of its version.")]
FileName = Annotated[str, Path(description="One of the files that POST /v1/cluster/join lists.")]


@router.get("/v1/cluster", role=Role.INFERENCE)
async def status(services: ServicesDep, cluster: ClusterDep) -> ClusterObject:
    """The nodes of the cluster, their adapter versions, and what the router has done."""
    return ClusterObject.of(cluster.client.status(), cluster.counts, services.key.sees)


@router.post("/v1/cluster/join", role=Role.TRAIN, include_in_schema=False)
async def join(request: Request, cluster: NodesDep, body: Annotated[JoinBody, Depends(json_body(JoinBody))]) -> Joined:
    """Lets a node join the cluster, or join again. 409 if it has another base model."""
    host, _ = request.scope["server"]
    return await cluster.client.join(body.joining(), host)


@router.get("/v1/cluster/base/{file}", role=Role.TRAIN, include_in_schema=False)
async def base_file(cluster: NodesDep, file: FileName) -> LargeFile:
    """A file of the base model. Takes the header Range, so that a node can continue where it was interrupted."""
    return LargeFile(await cluster.client.base_file(file), media_type="application/octet-stream")


@router.put("/v1/cluster/adapters/{name}/{version}", role=Role.TRAIN, audited=True, include_in_schema=False)
async def put_adapter(
    request: Request,
    cluster: NodesDep,
    name: Name,
    version: Number,
    x_sha256: Annotated[str, Header(description="SHA-256 of the body, in hexadecimal digits.")],
    x_fence: Annotated[int, Header(ge=0, description="The number of the trainer's lease.")] = 0,
) -> VersionObject:
    """Keeps an adapter version, the body: a tar of its two files. When the answer comes, the version is staged, and
    every node fetches it. It is not live yet."""
    archive = await read_bytes(request, MAX_ARCHIVE_BYTES, ARCHIVE_TIMEOUT_S)
    kept = await cluster.client.put_adapter(AdapterRef(name, version), archive, x_sha256, x_fence)
    return VersionObject(**fields_of(kept), live=False)


@router.get("/v1/cluster/adapters/{name}/{version}", role=Role.TRAIN, include_in_schema=False)
async def adapter(cluster: NodesDep, name: Name, version: Number) -> LargeFile:
    """An adapter version, as it was uploaded."""
    file = await cluster.client.adapter_file(AdapterRef(name, version))
    return LargeFile(file, media_type="application/x-tar")


@router.post(GENERATE, role=Role.TRAIN, include_in_schema=False)
async def generate(request: Request, services: ServicesDep, cluster: NodesDep) -> Response:
    """Answers a request of the head with this node's engine, as lines of JSON. For nodes of the same version only."""
    asked = await read_body(request, services, WireRequest.model_validate_json)
    return EngineResponse(services, cluster.own, asked)


@router.post(SAMPLE, role=Role.TRAIN, include_in_schema=False)
async def sample(request: Request, services: ServicesDep, _: NodesDep) -> Response:
    """Answers a request of a trainer with any node's engine. For nodes of the same version only."""
    asked = await read_body(request, services, WireRequest.model_validate_json)
    return EngineResponse(services, services.engine, asked)
