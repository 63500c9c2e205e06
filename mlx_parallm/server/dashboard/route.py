"""`/dashboard`: the page for people, and its files. `api.root` serves the page at `/` too."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.server.dashboard.files import FILE_HEADERS, PAGE, built_files, page
from mlx_parallm.server.errors import UnknownRouteError

router = APIRouter(include_in_schema=False)


@router.get("/dashboard")
async def dashboard(request: Request) -> Response:
    """The page."""
    return page(request.headers)


@router.get("/dashboard/assets/{name}")
async def built_file(name: str, request: Request) -> Response:
    """A script, a style sheet, or the licences of what they contain."""
    file = built_files().get(name)
    if file is None or name == PAGE:
        raise UnknownRouteError("There is no such file.")
    return file.response(request.headers, FILE_HEADERS)
