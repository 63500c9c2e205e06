"""`/login` and `/logout`: people open the pages of the server with their key."""

from __future__ import annotations

import html
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from mlx_parallm.errors import OverloadedError
from mlx_parallm.server.access import COOKIE, LIFETIME_S, LOGIN, PAGES
from mlx_parallm.server.body import read_bytes
from mlx_parallm.server.errors import BodyTooLargeError, ForbiddenOriginError
from mlx_parallm.server.request_log import address_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep

MAX_FORM_BYTES = 4096
FORM_TIMEOUT_S = 10.0
FIRST_PAGE = "/"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "same-origin",
}

router = Router(include_in_schema=False)


@router.get(LOGIN, role=None)
async def show_login(request: Request) -> HTMLResponse:
    """The form that asks for the key."""
    return _page(request.query_params.get("next", FIRST_PAGE))


@router.post(LOGIN, role=None)
async def log_in(request: Request, services: ServicesDep) -> Response:
    """Begins a session with the key of the form, and opens the page that it names. The Origin header must be sent,
    which browsers always do; `EntryMiddleware` has checked that it is this server's."""
    if "origin" not in request.headers:
        raise ForbiddenOriginError("This is for browsers; programs send the key as `Authorization: Bearer <key>`.")
    form = await _form(request)
    page, secret = form.get("next", [FIRST_PAGE])[0], form.get("key", [""])[0].strip().encode()
    try:
        key = services.ring.find(secret, address_of(request.scope))
    except OverloadedError as error:
        return _page(page, str(error), 429, {"retry-after": str(error.retry_after_s)})
    if key is None:
        return _page(page, "That is not a key of this server.", 401)
    answer = RedirectResponse(page if page in PAGES else FIRST_PAGE, status_code=303)
    answer.set_cookie(
        COOKIE,
        services.sessions.open(key),
        max_age=LIFETIME_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/logout", role=None)
async def log_out(request: Request, services: ServicesDep) -> Response:
    """Ends the session."""
    services.sessions.close(request.headers)
    answer = RedirectResponse(LOGIN, status_code=303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


async def _form(request: Request) -> dict[str, list[str]]:
    """The fields of the form; none if there is more than the form of the login page can have. Raises
    BodyTimeoutError."""
    try:
        body = await read_bytes(request, MAX_FORM_BYTES, FORM_TIMEOUT_S)
        return parse_qs(body.decode("ascii", "replace"), max_num_fields=8)
    except (BodyTooLargeError, ValueError):  # ValueError: too many fields
        return {}


def _page(page: str, fault: str = "", status: int = 200, headers: dict[str, str] | None = None) -> HTMLResponse:
    text = files("mlx_parallm.server").joinpath("login.html").read_text("utf-8")
    shown = page if page in PAGES else FIRST_PAGE
    text = text.replace("{next}", html.escape(shown)).replace("{fault}", html.escape(fault))
    return HTMLResponse(text, status, {**HEADERS, **(headers or {})})
