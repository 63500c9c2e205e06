"""`GET /`: the dashboard for people. Programs see that a server runs; clients of Ollama, that it is one they know."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from mlx_parallm.config import ServerConfig
from mlx_parallm.server.access import Role
from mlx_parallm.server.dashboard.route import page
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

router = Router()


@router.get("/", role=Role.INFERENCE, response_class=PlainTextResponse)
async def root(request: Request, services: ServicesDep) -> Response:
    """Says `Ollama is running`, or `MLX ParaLLM is running` if Ollama's API is turned off. A browser gets the
    dashboard, or is sent to `/docs` if that is turned off."""
    shown = page_for(request, services.config)
    name = "Ollama" if services.config.ollama_api else "MLX ParaLLM"
    return shown or PlainTextResponse(f"{name} is running", headers={"vary": "accept"})


def page_for(request: Request, config: ServerConfig) -> Response | None:
    """What a browser gets that opens `/`; None for programs."""
    if "text/html" not in request.headers.get("accept", ""):
        return None
    return page(request.headers) if config.dashboard else RedirectResponse("/docs", headers={"vary": "accept"})
