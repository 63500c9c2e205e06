"""How a module declares its routes: path, role, audit and examples stand beside the handler.

    router = Router()

    @router.post("/v1/training/pause", role=Role.TRAIN, audited=True, examples={"default adapter": {}})
    async def pause(body: Control, ...) -> TrainingObject: ...

`entry.Guard` reads from the route what a key needs, and `openapi` reads the examples. `server.app.ROUTES` lists the
modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi.routing import APIRoute

from mlx_parallm.server.access import Access, Role

Examples = Mapping[str, Mapping[str, Any]]
Handler = TypeVar("Handler", bound=Callable[..., Any])


class Endpoint(APIRoute):
    """A route, with what it needs of a key, and with example bodies by name.

    Each example can be sent unchanged to a server that trains and has an adapter `math`. One with a trajectory id or a
    folder needs one of that name, and that of `/v1/training/stop` an adapter in training.
    """

    def __init__(
        self, path: str, handler: Callable[..., Any], access: Access, examples: Examples, **declared: Any
    ) -> None:
        super().__init__(path, handler, **declared)
        self.access = access
        self.examples = examples


class Router:
    """The routes of a module, in the order in which they are matched.

    Args:
        prefix: of every path.
        declared: of every route, for FastAPI's `APIRoute`, such as `tags`.
    """

    def __init__(self, prefix: str = "", **declared: Any) -> None:
        self.routes: list[Endpoint] = []
        self._prefix = prefix
        self._declared = declared

    def add(
        self,
        method: str,
        *paths: str,
        role: Role | None,
        audited: bool = False,
        examples: Examples | None = None,
        **declared: Any,
    ) -> Callable[[Handler], Handler]:
        """A decorator that makes a function the handler of these paths.

        Args:
            role: the least role of a key; None: no key is needed.
            audited: whether it is a control action, which the audit log records.
            declared: for FastAPI's `APIRoute`, such as `response_model`.
        """
        access, common = Access(role, audited), {"methods": [method], **self._declared, **declared}

        def added(handler: Handler) -> Handler:
            self.routes += (Endpoint(self._prefix + path, handler, access, examples or {}, **common) for path in paths)
            return handler

        return added

    def get(self, *paths: str, role: Role | None, **declared: Any) -> Callable[[Handler], Handler]:
        """`add` for GET. The server answers HEAD with the same handler."""
        return self.add("GET", *paths, role=role, **declared)

    def post(self, *paths: str, role: Role | None, **declared: Any) -> Callable[[Handler], Handler]:
        """`add` for POST."""
        return self.add("POST", *paths, role=role, **declared)

    def put(self, *paths: str, role: Role | None, **declared: Any) -> Callable[[Handler], Handler]:
        """`add` for PUT."""
        return self.add("PUT", *paths, role=role, **declared)

    def delete(self, *paths: str, role: Role | None, **declared: Any) -> Callable[[Handler], Handler]:
        """`add` for DELETE."""
        return self.add("DELETE", *paths, role=role, **declared)
