"""A cluster as the HTTP server of one of its nodes sees it, and the app of that node."""

from dataclasses import replace

from server.fakes import CARD, ByteTokenizer
from server.one_model import OneModel

from mlx_parallm.config import ServerConfig
from mlx_parallm.errors import ConflictError
from mlx_parallm.extras.cluster.cards import (
    ClusterStatus,
    Joined,
    NodeInfo,
    NodeRole,
    SharedBase,
    SharedVersion,
    VersionState,
)
from mlx_parallm.extras.cluster.http.parts import join
from mlx_parallm.server.app import create_app
from mlx_parallm.server.backend import Backend

TOKEN = "secret of the cluster"
VERSION = SharedVersion("math", 1, "ab", 5, 2)
HEAD = NodeInfo("head", NodeRole.HEAD, "http://10.0.0.1:8000", ("math@1",), 7, True, "x")


class FakeCluster:
    """A node of a cluster with one version. `nodes`: those that are present. `others`: those that answer requests."""

    def __init__(self, routes=True, others=()):
        self.token, self.routes, self.others = TOKEN, routes, others
        self.calls = []
        self.node, self.nodes = HEAD.id, (HEAD,)

    def others_with(self, ref):
        return self.others

    def status(self):
        versions = VersionState({"math": VERSION}, {VERSION.ref: VERSION})
        return ClusterStatus(self.node, True, self.nodes, versions, {"a@1": "why"}, 3, {"math": 6})

    async def join(self, joining, reached_at):
        if joining.fingerprint != "f":
            raise ConflictError("another base model", param="fingerprint")
        return Joined("replica-1", f"nats://{reached_at}:4222", "n", SharedBase("tiny", "f"))

    async def put_adapter(self, ref, archive, sha256, fence):
        self.calls.append((ref, archive, sha256, fence))
        return replace(VERSION, name=ref.name, version=ref.version)


def app_of(engine, adapters, cluster):
    return create_app(join(Backend(engine, adapters, OneModel(ByteTokenizer(), CARD), ServerConfig()), cluster))
