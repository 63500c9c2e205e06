"""Bytes of a connection, after a line that seeds how they are cut: what is no HTTP is answered once with an error, and
nothing is only logged. However the bytes are cut, the answers are the same, apart from those that come before the rest
of a body: they close the connection, and what is malformed there is not seen.
"""

import asyncio
import logging
import re
from random import Random

from fuzz.mutation import after_first_line, with_words
from fuzz.wire import Wire
from uvicorn.server import ServerState

from mlx_parallm.server.run import _uvicorn_config

WIRE = Wire()
CONFIG = _uvicorn_config(WIRE.app)
CONFIG.load()
TURNS = 2000
mutated = after_first_line(
    with_words(
        *("POST /v1/completions HTTP/1.1\r\n", "GET /v1/models HTTP/1.1\r\n", "Host: localhost:8000\r\n", "\r\n", "\n"),
        *(
            "Transfer-Encoding: chunked\r\n",
            "Content-Length: 14\r\n",
            "Content-Type: application/json\r\n",
            "0\r\n\r\n",
        ),
        *(
            "Expect: 100-continue\r\n",
            "Connection: close\r\n",
            "Upgrade: h2c\r\n",
            '{"prompt":"x"}',
            "e\r\n",
            "\0",
            " ",
        ),
        *("Transfer-Encoding: gzip, chunked\r\n", "Content-Encoding: gzip\r\n", "Content-Length: +14\r\n", ";a=b", ":"),
        *("HEAD", "CONNECT", "OPTIONS", "http://localhost:8000/", "%0a", "%", "?", "a" * 4000, "HTTP/1.0", "\x80"),
    ),
    [str(seed) for seed in range(16)],
)


class Faults(logging.Handler):
    """Raises what uvicorn would only log."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.found = []

    def emit(self, record):
        self.found.append(record.exc_info[1] if record.exc_info else AssertionError(record.getMessage()))


FAULTS = Faults()
logging.getLogger("uvicorn.error").handlers = [FAULTS]
logging.getLogger("uvicorn.error").propagate = False


class Pipe(asyncio.Transport):
    """A client's end of a connection, which reads everything at once."""

    def __init__(self):
        super().__init__({"peername": ("127.0.0.1", 5000), "sockname": ("127.0.0.1", 8000)})
        self.written = b""
        self.closing = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    def can_write_eof(self):
        return True

    abort = close

    def get_write_buffer_size(self):
        return 0

    def _ignored(self, *_):
        pass

    write_eof = pause_reading = resume_reading = set_write_buffer_limits = set_protocol = _ignored


async def answered(pieces):
    """The statuses of all answers to these pieces, after which the client has gone."""
    state, pipe = ServerState(), Pipe()
    loop = asyncio.get_running_loop()
    protocol = CONFIG.http_protocol_class(config=CONFIG, server_state=state, app_state={}, _loop=loop)
    protocol.connection_made(pipe)
    for piece in pieces:
        if not pipe.closing:
            protocol.data_received(piece)
        await settled(protocol, pipe)
    protocol.eof_received()
    protocol.connection_lost(None)
    if state.tasks:
        await asyncio.wait_for(asyncio.gather(*state.tasks), 60)
    if FAULTS.found:
        raise FAULTS.found.pop()
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", pipe.written)]
    return [status for status in statuses if status != 100]


async def settled(protocol, pipe):
    """Returns when the server waits for more of the client."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
        cycle = protocol.cycle
        if cycle is None or cycle.response_complete or pipe.closing:
            return
        if cycle.more_body and not protocol.flow.read_paused:
            await asyncio.sleep(0.001)
            return


def run(data):
    seed, _, raw = data.partition(b"\n")
    rng = Random(seed)
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice((0, 1, 3, 9))))
    pieces = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True) if begin < end]
    WIRE.reset()
    statuses = WIRE.runner.run(answered(pieces))
    assert all(status < 500 for status in statuses), statuses
    WIRE.check_idle()
    WIRE.reset()
    whole = WIRE.runner.run(answered([raw] if raw else []))
    for one, other in zip(whole, statuses, strict=False):
        assert one == other or 400 in (one, other), (whole, statuses)
