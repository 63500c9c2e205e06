"""Requests that mean a route though they are not written as it is: HEAD for GET, and a slash at the end of the path."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LenientMiddleware:
    """The same handler answers, without a redirect, which clients do not follow with a body. The answer to HEAD is that
    to GET without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # In place: the request log, which is outside of this, reads the route that was found from the same scope.
        if len(scope["path"]) > 1:
            scope["path"] = scope["path"].removesuffix("/")
        if scope["method"] == "HEAD":
            scope["method"] = "GET"
            send = _without_body(send)
        await self._app(scope, receive, send)


def _without_body(send: Send) -> Send:
    """Ends the response after its headers. A stream hears of it as of a client that has left."""

    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_headers
