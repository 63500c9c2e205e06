"""What a node does with the answers of its head."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_parallm.errors import ConfigError, EngineError
from mlx_parallm.extras.cluster.archive import digest
from mlx_parallm.extras.cluster.cards import BaseFile, SharedVersion
from mlx_parallm.extras.cluster.head_client import HeadClient, HeadUnreachableError

ARCHIVE = bytes(range(256)) * 400
MATH = SharedVersion("math", 3, digest(ARCHIVE), len(ARCHIVE))
PATH = "/v1/cluster/adapters/math/3"


class Head(ThreadingHTTPServer):
    """Answers each path with a status and a body. `cut`: it ends the connection before the body is complete."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.sent_tokens, self.sent_bytes, self.cut = {}, [], [], False
        self.address = f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.sent_tokens.append(self.headers["authorization"])
        status, body = self.server.answers[self.path]
        if begun := self.headers["range"]:
            status, body = 206, body[int(begun.removeprefix("bytes=").removesuffix("-")) :]
        self.server.sent_bytes.append(len(body))
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.server.cut else body)

    def log_message(self, *words):
        pass


@pytest.fixture
def head():
    with Head() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.shutdown()


async def fetched(head):
    async with HeadClient(head.address, "secret") as client:
        return await client.adapter(MATH)


async def test_an_archive_with_another_checksum_is_refused(head):
    head.answers[PATH] = 200, ARCHIVE[:-1] + b"?"
    with pytest.raises(EngineError, match="another checksum"):
        await fetched(head)


async def test_half_an_archive_counts_as_no_answer(head):
    head.answers[PATH], head.cut = (200, ARCHIVE), True
    with pytest.raises(HeadUnreachableError, match="no head answers"):
        await fetched(head)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, ConfigError, "the token is not the cluster's"),
        (404, ConfigError, "refuses this node: gone"),
        (503, HeadUnreachableError, "cannot answer: gone"),
    ],
)
async def test_errors_of_the_head_say_what_is_wrong(head, status, kind, message):
    head.answers[PATH] = status, b'{"error": {"message": "gone"}}'
    with pytest.raises(kind, match=message):
        await fetched(head)


async def test_no_head(head):
    async with HeadClient("127.0.0.1:9", "secret") as client:
        with pytest.raises(HeadUnreachableError, match="start it there with --share-model"):
            await client.adapter(MATH)


async def test_base_files_stay_in_their_folder(head, tmp_path):
    async with HeadClient(head.address, "secret") as client:
        with pytest.raises(ConfigError, match="outside the model's folder"):
            await client.fetch_base((BaseFile("../config.json", 2, digest(b"{}")),), tmp_path / "model")
    assert head.sent_tokens == []
    assert not (tmp_path / "config.json").exists()


async def test_a_base_file_whose_fetch_was_broken_off_is_continued_and_checked(head, tmp_path):
    file, path = BaseFile("weights", len(ARCHIVE), digest(ARCHIVE)), tmp_path / "model" / "weights"
    head.answers["/v1/cluster/base/weights"], head.cut = (200, ARCHIVE), True
    async with HeadClient(head.address, "secret") as client:
        with pytest.raises(HeadUnreachableError):
            await client.fetch_base((file,), path.parent)
        assert not path.exists(), "what is not complete has no name of its own"
        head.cut = False
        await client.fetch_base((file,), path.parent)
        assert path.read_bytes() == ARCHIVE
        assert head.sent_bytes == [len(ARCHIVE), len(ARCHIVE) // 2]
        await client.fetch_base((file,), path.parent)
        assert len(head.sent_bytes) == 2, "it is there already"
        path.rename(path.with_name(".weights.part"))
        path.with_name(".weights.part").write_bytes(ARCHIVE[:-1] + b"?")
        with pytest.raises(EngineError, match="another checksum"):
            await client.fetch_base((file,), path.parent)
        await client.fetch_base((file,), path.parent)
        assert path.read_bytes() == ARCHIVE
