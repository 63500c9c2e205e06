"""Traces: the spans of requests and of the updates that learn from them, and a collector that does not answer."""

import asyncio
import json
import logging
import socket
import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from rl.service_rig import until, world
from server.asking import client_of
from server.fake_control import FakeAdapters
from server.fakes import CARD, ByteTokenizer, FakeEngine
from server.one_model import OneModel

from mlx_parallm import optional_packages as extras
from mlx_parallm.config import ServerConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.app import create_app
from mlx_parallm.server.backend import Backend
from mlx_parallm.server.traces import Traces, open_traces

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collected:
    """Traces into memory, and the apps that make them."""

    def __init__(self, exporter=None):
        self.exporter = exporter or InMemorySpanExporter()
        self.traces = Traces(self.exporter)

    def client(self, engine, adapters=None, training=None, **settings):
        model = OneModel(ByteTokenizer(), CARD)
        backend = Backend(engine, adapters or FakeAdapters(), model, ServerConfig(**settings), training)
        return client_of(create_app(backend, self.traces))

    def spans(self):
        """All spans that have ended, in the order of their beginnings."""
        self.traces.flush()
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time)

    def requests(self):
        """Those of requests."""
        return [span for span in self.spans() if span.kind is SpanKind.SERVER]

    def one_tree(self):
        """The span of the only request, and its parts by name."""
        (root,) = self.requests()
        parts = [span for span in self.spans() if span is not root]
        assert {part.parent.span_id for part in parts} <= {root.context.span_id}
        assert {part.context.trace_id for part in parts} <= {root.context.trace_id}
        return root, {part.name: part for part in parts}


@pytest.fixture
def collected():
    made = Collected()
    yield made
    made.traces.close()


def milliseconds(span):
    return round((span.end_time - span.start_time) / 1e6)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_tree_of_spans(collected, engine, adapters, stream):
    adapters.publish("tone")
    engine.cached_tokens = 1
    client = collected.client(engine, adapters)
    body = {"messages": [{"role": "user", "content": "secret"}], "model": "tone", "max_tokens": 3, "n": 2}
    response = await client.post(CHAT, json={**body, "temperature": 0.5, "seed": 7, "stream": stream})
    assert response.status_code == 200
    root, parts = collected.one_tree()
    assert {name: milliseconds(part) for name, part in parts.items()} == {"queue": 100, "prefill": 100, "decode": 200}
    assert parts["queue"].end_time == parts["prefill"].start_time
    assert parts["prefill"].end_time == parts["decode"].start_time
    assert (root.name, root.kind, root.status.status_code) == ("chat tone", SpanKind.SERVER, StatusCode.UNSET)
    expected = {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tone",
        "gen_ai.response.model": "tone@1",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": len(engine.requests[0].prompts[0]),
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.id": response.headers["x-request-id"],
        "mlx_parallm.adapter": "tone@1",
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    assert root.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(0.1)
    assert root.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(0.2)
    assert "secret" not in root.to_json()


async def test_the_trace_of_the_client_is_continued_and_named_in_answer_and_log(collected, engine, caplog):
    caplog.set_level(logging.INFO, "mlx_parallm.access")
    client = collected.client(engine)
    response = await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"traceparent": PARENT})
    (root,) = collected.requests()
    trace_id, span_id = f"{root.context.trace_id:032x}", f"{root.context.span_id:016x}"
    assert (trace_id, f"{root.parent.span_id:016x}") == (PARENT[3:35], PARENT[36:52])
    assert root.name == f"text_completion {CARD.name}"
    assert response.headers["traceresponse"] == f"00-{trace_id}-{span_id}-01"
    lines = [json.loads(line.getMessage()) for line in caplog.records if line.name == "mlx_parallm.access"]
    assert [line["trace_id"] for line in lines] == [trace_id]


async def test_a_trace_that_the_client_does_not_sample_is_not_recorded(collected, engine):
    headers = {"traceparent": PARENT[:-1] + "0"}
    response = await collected.client(engine).post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    assert response.headers["traceresponse"].startswith(PARENT[:35])
    assert collected.spans() == []


async def test_what_generates_nothing_has_one_span_and_probes_have_none(collected, engine):
    client = collected.client(engine)
    for path in ("/health", "/metrics", "/v1/models", "/nope"):
        await client.get(path, headers={"traceparent": "nonsense"})
    models, missing = collected.spans()
    assert (models.name, models.parent) == ("GET /v1/models", None)
    assert (missing.name, missing.attributes["error.type"], missing.status.status_code) == (
        "GET",
        "not_found",
        StatusCode.UNSET,
    )


# ---- training -----------------------------------------------------------------------------------


class CollectedEngine(FakeEngine):
    """Its answers come with the log-probabilities of their tokens."""

    def _output(self, request, index, token, text, last):
        output = super()._output(request, index, token, text, last)
        return type(output)(index, (token,), text, finish_reason=output.finish_reason, sampling_logprobs=(-0.5,))


async def test_a_trajectory_is_traced_into_its_update(collected):
    body = {"prompt": "x", "max_tokens": 2, "n": 2, "collect_trajectory": True, "scoring_function": "exact"}
    async with world() as made:
        made.service.add_sink(collected.traces.training.on_event)
        client = collected.client(CollectedEngine(), training=made.service)
        for _ in range(2):  # update_frequency is 4
            assert (await client.post(COMPLETIONS, json={**body, "metadata": {"answer": "H"}})).status_code == 200
        await until(lambda: made.service.status().updates_total == 1)
    spans = collected.spans()
    requests = collected.requests()
    scores = [span for span in spans if span.name == "score"]
    (update,) = (span for span in spans if span.name == "update main")
    assert [score.parent.span_id for score in scores] == [request.context.span_id for request in requests]
    assert [score.attributes["mlx_parallm.reward_mean"] for score in scores] == [0.5, 0.5]
    assert [link.context.span_id for link in update.links] == [score.context.span_id for score in scores]
    assert {link.context.trace_id for link in update.links} == {request.context.trace_id for request in requests}
    assert update.context.trace_id not in {request.context.trace_id for request in requests}
    figures = ("status", "version", "step", "trajectories", "loss")
    assert [update.attributes[f"mlx_parallm.{name}"] for name in figures] == ["published", "main@1", 1, 4, 0.5]


# ---- the collector -------------------------------------------------------------------------------


class Hanging(SpanExporter):
    """Never returns from an export until `let_go` is set."""

    def __init__(self):
        self.begun, self.let_go = threading.Event(), threading.Event()

    def export(self, spans):
        self.begun.set()
        self.let_go.wait()
        return SpanExportResult.FAILURE


async def test_a_collector_that_hangs_delays_neither_requests_nor_the_end(engine, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    hanging = Collected(Hanging())
    client = hanging.client(engine)
    for _ in range(20):  # of four spans each
        assert (await client.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200
    assert hanging.exporter.begun.wait(5)
    closing = threading.Thread(target=hanging.traces.close, args=(0.01,))
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
    hanging.exporter.let_go.set()


def read_request(connection):
    """A whole request with Content-Length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head + body


async def test_spans_reach_a_collector_at_the_path_of_otlp(engine):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        traces = open_traces(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        made = Collected.__new__(Collected)
        made.traces = traces
        await made.client(engine).post(COMPLETIONS, json={"prompt": "x"})
        closing = asyncio.create_task(asyncio.to_thread(traces.close))
        connection, _ = await asyncio.to_thread(listening.accept)
        with connection:
            received = await asyncio.to_thread(read_request, connection)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await closing
    assert received.startswith(b"POST /v1/traces HTTP/1.1\r\n")
    for text in (b"application/x-protobuf", b"service.name", b"mlx_parallm", b"queue", b"prefill", b"decode"):
        assert text in received


def test_a_missing_package_and_another_protocol_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: traces are sent as http/protobuf only"):
        open_traces("http://127.0.0.1:4318")
    monkeypatch.setattr("mlx_parallm.server.traces.OTEL", extras.Extra("not.there", "opentelemetry", "otel"))
    with pytest.raises(ConfigError, match=r"server.otlp_traces_endpoint: .*mlx-parallm\[otel\]"):
        open_traces("http://127.0.0.1:4318")
