"""`/v1/cluster` and the routes below it, by which the nodes of a cluster work together. All but the first want the
token of the cluster as `Authorization: Bearer <token>`, whether or not the server requires API keys. Only the first is
in the OpenAPI document, because the others are for nodes of the same version."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from mlx_parallm.core import AdapterRef
from mlx_parallm.errors import ConflictError, InvalidRequestError, UnknownModelError
from mlx_parallm.server.access.guard import sent_keys
from mlx_parallm.server.api.fields import INT32_MAX
from mlx_parallm.server.cluster.generate import EngineResponse
from mlx_parallm.server.cluster.parts import ClusterParts
from mlx_parallm.server.cluster.remote import GENERATE, SAMPLE
from mlx_parallm.server.cluster.schema import ClusterObject, JoinAnswer, JoinBody, VersionObject
from mlx_parallm.server.cluster.wire import WireRequest
from mlx_parallm.server.errors import ApiKeyError, BodyTimeoutError, BodyTooLargeError
from mlx_parallm.server.http.body import json_body, read_body, read_bytes
from mlx_parallm.server.openapi.responses import raises
from mlx_parallm.server.services import KeyDep, ServicesDep

MAX_ARCHIVE_BYTES = 1 << 30
ARCHIVE_TIMEOUT_S = 600.0
"""The largest archive of an adapter, and the time that it may take to arrive."""

router = APIRouter()


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


@router.get("/v1/cluster", responses=raises(ConflictError))
async def status(cluster: ClusterDep, key: KeyDep) -> ClusterObject:
    """The nodes of the cluster, their adapter versions, and what the router has done."""
    return ClusterObject.of(cluster.client.status(), cluster.counts, key.sees)


@router.post("/v1/cluster/join", include_in_schema=False, responses=raises(ApiKeyError, ConflictError))
async def join(
    request: Request, cluster: NodesDep, body: Annotated[JoinBody, Depends(json_body(JoinBody))]
) -> JoinAnswer:
    """Lets a node join the cluster, or join again. 409 if it has another base model."""
    host, _ = request.scope["server"]
    return JoinAnswer.of(await cluster.client.join(body.joining(), host))


@router.get("/v1/cluster/base/{file}", include_in_schema=False, responses=raises(ApiKeyError, ConflictError))
async def base_file(cluster: NodesDep, file: FileName) -> LargeFile:
    """A file of the base model. Takes the header Range, so that a node can continue where it was interrupted."""
    return LargeFile(await cluster.client.base_file(file), media_type="application/octet-stream")


@router.put(
    "/v1/cluster/adapters/{name}/{version}",
    include_in_schema=False,
    responses=raises(ApiKeyError, ConflictError, InvalidRequestError, BodyTooLargeError, BodyTimeoutError),
)
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
    return VersionObject.of(kept)


@router.get(
    "/v1/cluster/adapters/{name}/{version}",
    include_in_schema=False,
    responses=raises(ApiKeyError, ConflictError, UnknownModelError),
)
async def adapter(cluster: NodesDep, name: Name, version: Number) -> LargeFile:
    """An adapter version, as it was uploaded."""
    file = await cluster.client.adapter_file(AdapterRef(name, version))
    return LargeFile(file, media_type="application/x-tar")


@router.post(GENERATE, include_in_schema=False, responses=raises(ApiKeyError, ConflictError, UnknownModelError))
async def generate(request: Request, services: ServicesDep, cluster: NodesDep) -> Response:
    """Answers a request of the head with this node's engine, as lines of JSON. For nodes of the same version only."""
    asked = await read_body(request, services, WireRequest.model_validate_json)
    return EngineResponse(services, cluster.own, asked)


@router.post(SAMPLE, include_in_schema=False, responses=raises(ApiKeyError, ConflictError, UnknownModelError))
async def sample(request: Request, services: ServicesDep, cluster: NodesDep) -> Response:
    """Answers a request of a trainer with any node's engine. For nodes of the same version only."""
    asked = await read_body(request, services, WireRequest.model_validate_json)
    return EngineResponse(services, cluster.engine, asked)
