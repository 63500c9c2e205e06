"""Traces of requests and updates, sent to a collector of OpenTelemetry, whose package is an extra. It is imported only
if traces are turned on.

    request ─▶ RequestSpans ┐
                            ├─▶ queue of the SDK, bounded ─▶ its thread ─▶ OTLP over HTTP ─▶ collector
    training events ─▶ TrainingSpans ┘

Spans are made on the event loop's thread, of times that the engine has recorded. The SDK's thread sends them; if the
collector hangs, the queue loses spans and nothing else waits. The standard variables OTEL_... configure the rest.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mlx_parallm import __version__
from mlx_parallm.errors import ConfigError
from mlx_parallm.optional_packages import OTEL

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE_NAME = "mlx_parallm"
"""The name of the service, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another one."""
TRACES_PATH = "/v1/traces"
CLOSE_S = 2.0
"""The most time at the end for spans that are not sent yet."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def open_traces(endpoint: str | None) -> Traces | None:
    """What makes traces and sends them to this URL, or to its path `TRACES_PATH` if it has no path; None without a URL.

    Raises:
        ConfigError: the package is not installed, or the environment asks for a protocol other than `_PROTOCOL`.
    """
    if endpoint is None:
        return None
    if not OTEL.installed:
        raise ConfigError(f"server.otlp_traces_endpoint: {OTEL.missing}")
    name = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    if name is not None and os.environ[name] != _PROTOCOL:
        raise ConfigError(f"{name}: traces are sent as {_PROTOCOL} only, got {os.environ[name]!r}")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    path = "" if urlsplit(endpoint).path.strip("/") else TRACES_PATH
    return Traces(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path))


class Traces:
    """Makes the spans of requests and of training. Event loop's thread only, but for `flush` and `close`.

    Args:
        exporter: sends the spans; called on a thread of the SDK.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from mlx_parallm.server.spans import RequestSpans, TrainingSpans

        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": SERVICE_NAME}
        resource = Resource.create({"service.version": __version__, **name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = self._provider.get_tracer(SERVICE_NAME, __version__)
        self.requests = RequestSpans(tracer)
        self.training = TrainingSpans(tracer)

    def flush(self) -> None:
        """Blocks until the spans that have ended are sent."""
        self._provider.force_flush()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Ends all spans and sends what waits. Blocks for `timeout_s` at most; what is not sent by then is lost."""
        self.training.close()
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
