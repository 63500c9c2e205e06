"""`/docs`: the OpenAPI document for people. One page of our own, which loads nothing but `/openapi.json`."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse

HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}

router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    """Needs no network beyond this server."""
    page = files("mlx_parallm.server").joinpath("docs.html").read_text("utf-8")
    return HTMLResponse(page, headers=HEADERS)
