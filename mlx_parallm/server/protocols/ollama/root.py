"""`GET /`, by which clients of Ollama see that a server runs."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

router = APIRouter(tags=["Ollama"])


@router.get("/", response_class=PlainTextResponse)
async def root(request: Request) -> Response:
    """Says `Ollama is running`. A browser is sent to `/docs`."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("/docs", headers={"vary": "accept"})
    return PlainTextResponse("Ollama is running", headers={"vary": "accept"})
