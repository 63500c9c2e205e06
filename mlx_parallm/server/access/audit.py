"""The audit log: one line of JSON for each control action, such as loading an adapter or pausing the server.

A line says who asked for what and when, and what came of it. It has no text of prompts or answers, because it has
nothing of a request's body.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path

from starlette.types import Scope

from mlx_parallm.atomic import write_file
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.http.request_log import CLIENT_LEFT, RequestRecord

_MAX_TEXT = 200


class AuditLog:
    """Appends to a file that only its owner can read. A file that was moved away is made again, so that programs that
    rotate logs may move it.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                write_file(file, b"", mode=0o600)
            self._handler = WatchedFileHandler(file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"audit_log: {file} cannot be written: {error.strerror}") from error

    def write(self, record: RequestRecord, scope: Scope) -> None:
        """Adds the line of a request that has ended. A fault of the disk is reported on stderr, and the request is
        answered all the same."""
        line = json.dumps(_line(record, scope), separators=(",", ":"))
        self._handler.handle(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))


def _line(record: RequestRecord, scope: Scope) -> dict[str, object]:
    client = scope.get("client")
    query = scope.get("query_string", b"").decode("ascii", "replace")
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "key": None if record.key is None else record.key.name,
        "client": client[0] if client else None,
        "method": record.method,
        "path": (record.path or "")[:_MAX_TEXT],
        "query": query[:_MAX_TEXT],
        "status": record.status or CLIENT_LEFT,
        "error": record.error,
        "id": record.request_id,
    }
