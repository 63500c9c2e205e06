"""A client that leaves frees its rows, whatever phase its request is in (case 22); on a real uvicorn."""

import asyncio
import json

import httpx
import pytest
from server.asking import eventually

from mlx_parallm.server.streams import while_connected

PATIENCE_S = 30
PHASES = {"queued": 0, "prefill": 1, "decode": 3}
"""Events the engine has sent before it is paused: none, the prompt's scores, two tokens."""


async def post(port, body, path="/v1/completions"):
    """Sends a request on a connection of its own; the caller reads, or leaves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    )
    writer.write(f"{head}\r\n".encode() + raw)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
async def test_leaving_aborts(serving, engine, adapters, metric, phase, stream):
    adapters.publish("math")
    engine.pause_before = PHASES[phase]
    async with serving() as server:
        gate = server.app.state.services.gate
        body = {"prompt": "x", "model": "math", "n": 2, "echo": True, "logprobs": 0, "stream": stream}
        reader, writer = await post(server.port, body)
        await asyncio.wait_for(engine.paused.wait(), PATIENCE_S)
        if stream and phase == "decode":
            await reader.readuntil(b'"text":"H"')
        assert (len(engine.live), gate.held, adapters.leased) == (1, 2, 1)
        writer.close()
        await eventually(lambda: not engine.live and gate.held == adapters.leased == 0)
        assert engine.aborted == 1
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert await metric(client, "mlx_parallm_client_disconnects_total") == 1
            assert await metric(client, 'mlx_parallm_request_success_total{finished_reason="abort"}') == 2


async def test_a_client_that_closes_its_side_counts_as_gone(serving, engine):
    engine.pause_before = PHASES["decode"]
    async with serving() as server:
        reader, writer = await post(server.port, {"prompt": "x"})
        await asyncio.wait_for(engine.paused.wait(), PATIENCE_S)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        await eventually(lambda: engine.aborted == 1 and not engine.live)
        writer.close()


@pytest.mark.parametrize(
    ("path", "body", "done"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "x"}, lambda it: it.find("new").ref.version == 1),
        ("/v1/adapters/route", {"weights": {"math": 1}}, lambda it: it.route() == {"math": 1.0}),
        ("/v1/training/checkpoint", {"step": 1}, lambda it: it.checkpoints()[0].step == 1),
    ],
)
async def test_leaving_does_not_stop_a_change_of_adapters(serving, adapters, caplog, path, body, done):
    adapters.publish("math")
    adapters.hold = True
    async with serving() as server:
        lifecycle = server.app.state.services.lifecycle
        _, writer = await post(server.port, body, path)
        await asyncio.wait_for(adapters.held.wait(), PATIENCE_S)
        writer.close()
        await eventually(lambda: not server.uvicorn.server_state.connections)
        assert lifecycle.working
        adapters.go_on.set()
        await eventually(lambda: not lifecycle.working)
        assert done(adapters)
    assert not caplog.records


async def test_a_timeout_in_a_block_is_not_taken_for_a_disconnect():
    async def timed_out():
        async with while_connected(asyncio.Event().wait, asyncio.Event()):
            raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await timed_out()
