"""A stand-in for the Hugging Face hub: the part of its API that `huggingface_hub` asks for, over HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

TOKEN = "hf_of_the_tests"
_GIT_LFS = 1000
"""Larger files are not part of a commit but uploaded before it, as on the hub."""


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """Those of the newest commit."""
        return self.commits[self.refs["main"]] if self.refs else {}

    def commit(self, files: dict[str, bytes], *tags: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = self.files | files
        self.refs.update(dict.fromkeys(("main", *tags), sha))
        return sha


@dataclass
class Hub:
    """`asked`: method and path of each request. `sizes`: of files, in place of the true ones, by path."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None

    def with_files(self, name: str, files: dict[str, bytes], *tags: str, private: bool = False) -> str:
        """Adds a commit to a repository. Returns its sha."""
        return self.repositories.setdefault(name, Repository(private)).commit(files, *tags)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        self.hub.before()
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        for pattern, handle in self.ROUTES.items():
            if match := re.fullmatch(pattern, path):
                return handle(self, *match.groups())
        return self._send({"error": "not here"}, 404)

    def _send(self, answer: Any, status: int = 200, **headers: str) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refused(self, code: str, status: int = 404) -> None:
        self._send({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    @property
    def _signed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _found(self, name: str, ref: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a ref means, and its files. Answers, if there is none."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._signed):
            self._refused("RepoNotFound", 401)
            return None
        sha = repository.refs.get(ref, ref)
        if sha not in repository.commits and repository.commits:
            self._refused("RevisionNotFound")
            return None
        return sha, repository.commits.get(sha, {})

    def __getattr__(self, name: str) -> Any:
        if name in ("do_HEAD", "do_POST", "do_PUT"):
            return self.do_GET
        raise AttributeError(name)

    # -- what is asked ---------------------------------------------------------------------------

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self._signed:
            return self._refused("Unauthorized", 401)
        if name in self.hub.repositories:
            return self._send({"error": "exists", "url": f"{self.hub.url}/{name}"}, 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repositories[name] = Repository(bool(private))
        return self._send({"url": f"{self.hub.url}/{name}"})

    def _validate(self) -> None:
        assert json.loads(self.body)["content"].startswith("---\nbase_model: ")
        self._send({"errors": [], "warnings": []})

    def _preupload(self, name: str) -> None:
        files = json.loads(self.body)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] > _GIT_LFS else "regular", "shouldIgnore": False}
            for f in files
        ]
        self._send({"files": modes})

    def _batch(self, name: str) -> None:
        objects = json.loads(self.body)["objects"]
        links = [{"upload": {"href": f"{self.hub.url}/uploads/{each['oid']}"}} for each in objects]
        answer = [{**each, "actions": link} for each, link in zip(objects, links, strict=True)]
        self._send({"transfer": "basic", "objects": answer}, Content_Type="application/vnd.git-lfs+json")

    def _upload(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.uploads[oid] = self.body
        self._send({})

    def _commit(self, name: str) -> None:
        if not self._signed:
            return self._refused("Unauthorized", 401)
        files = {}
        for entry in map(json.loads, self.body.decode().splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        sha = self.hub.repositories[name].commit(files)
        return self._send({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

    def _info(self, name: str, ref: str = "main") -> None:
        if found := self._found(name, ref):
            siblings = [{"rfilename": path} for path in found[1]]
            self._send({"id": name, "sha": found[0], "siblings": siblings, "private": False, "tags": []})

    def _tree(self, name: str, ref: str) -> None:
        if found := self._found(name, ref):
            self._send([self._entry(path, data) for path, data in found[1].items()])

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        size = self.hub.sizes.get(path, len(data))
        return {"type": "file", "path": path, "oid": hashlib.sha1(data).hexdigest(), "size": size}

    def _file(self, name: str, ref: str, path: str) -> None:
        if found := self._found(name, ref):
            if path not in found[1]:
                return self._refused("EntryNotFound")
            etag = f'"{hashlib.sha1(found[1][path]).hexdigest()}"'
            size = str(self.hub.sizes.get(path, len(found[1][path])))
            return self._send(found[1][path], ETag=etag, X_Repo_Commit=found[0], X_Linked_Size=size)
        return None

    ROUTES: ClassVar[dict[str, Callable[..., None]]] = {
        r"/api/repos/create": _create,
        r"/api/validate-yaml": _validate,
        r"/api/models/([^/]+/[^/]+)/preupload/main": _preupload,
        r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch": _batch,
        r"/uploads/(\w+)": _upload,
        r"/api/models/([^/]+/[^/]+)/commit/main": _commit,
        r"/api/models/([^/]+/[^/]+)": _info,
        r"/api/models/([^/]+/[^/]+)/revision/(.+)": _info,
        r"/api/models/([^/]+/[^/]+)/tree/([^/]+)": _tree,
        r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": _file,
    }


@contextmanager
def serving_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, which `huggingface_hub` asks in this process while the block runs, without a token."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("_Here", (_Handler,), {"hub": hub})
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
