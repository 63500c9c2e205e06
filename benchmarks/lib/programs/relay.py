"""Passes streamed completions on to the engine with the fewest tokens outstanding, and does nothing else.

    python benchmarks/lib/programs/relay.py --port PORT --engines URL [URL ...]

It shows what a router in Python costs at least: it reads `max_tokens`, and copies bytes. `GET /health` tells the
processor seconds that it has taken.
"""

import argparse
import json
import time
from collections.abc import AsyncIterator, Sequence

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def relay_app(engines: Sequence[str]) -> Starlette:
    outstanding = dict.fromkeys(engines, 0)
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def completions(request: Request) -> Response:
        body = await request.body()
        return StreamingResponse(answer(body, json.loads(body)["max_tokens"]), media_type="text/event-stream")

    async def answer(body: bytes, tokens: int) -> AsyncIterator[bytes]:
        engine = min(engines, key=lambda url: outstanding[url])
        outstanding[engine] += tokens
        try:
            async with client.stream("POST", f"{engine}/v1/completions", content=body) as response:
                async for chunk in response.aiter_raw():
                    yield chunk
        finally:
            outstanding[engine] -= tokens

    async def health(_request: Request) -> Response:
        return JSONResponse({"cpu_s": time.process_time()})

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engines", nargs="+", required=True)
    arguments = parser.parse_args()
    uvicorn.run(relay_app(arguments.engines), host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
