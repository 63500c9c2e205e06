"""`/dashboard`: the page for people, and its files. `api.root` serves the page at `/` too.

`scripts/dashboard` builds the files into the folder `built`; they are read once, and compressed once. The page names
every other file by a hash of its contents, so browsers may keep those for ever.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.server.access import Role
from mlx_parallm.server.errors import UnknownRouteError
from mlx_parallm.server.routing import Router

PAGE = "index.html"
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
PAGE_HEADERS = {
    # The page runs no script and loads nothing but this server's files.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",  # with it, what the page asks for shows that the page asked
    "cache-control": "no-cache",
}
FILE_HEADERS = {"cache-control": "private, max-age=31536000, immutable"}


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """The contents of one file, as they are and compressed with gzip."""

    media_type: str
    body: bytes
    compressed: bytes

    def response(self, request: Headers, headers: Mapping[str, str]) -> Response:
        """The file, compressed if the request accepts that."""
        sent = {"content-type": self.media_type, "vary": "accept, accept-encoding", "x-content-type-options": "nosniff"}
        if "gzip" in request.get("accept-encoding", ""):
            return Response(self.compressed, headers={**sent, **headers, "content-encoding": "gzip"})
        return Response(self.body, headers={**sent, **headers})


@cache
def built_files() -> Mapping[str, BuiltFile]:
    """All files by name. Only these names are served, so a name is never a path."""
    built = files("mlx_parallm.server.dashboard").joinpath("built")
    return {file.name: _read(file) for file in (built.joinpath(PAGE), *built.joinpath("assets").iterdir())}


def _read(file: Traversable) -> BuiltFile:
    body = file.read_bytes()
    return BuiltFile(MEDIA_TYPES[file.name.rpartition(".")[2]], body, gzip.compress(body, mtime=0))


def page(request: Headers) -> Response:
    """The dashboard's page."""
    return built_files()[PAGE].response(request, PAGE_HEADERS)


router = Router(include_in_schema=False)


@router.get("/dashboard", role=Role.INFERENCE)
async def dashboard(request: Request) -> Response:
    """The page."""
    return page(request.headers)


@router.get("/dashboard/assets/{name}", role=Role.INFERENCE)
async def built_file(name: str, request: Request) -> Response:
    """A script, a style sheet, or the licences of what they contain."""
    file = built_files().get(name)
    if file is None or name == PAGE:
        raise UnknownRouteError("There is no such file.")
    return file.response(request.headers, FILE_HEADERS)
