"""An engine without a model: it streams completions at a fixed pace, from a limited number of rows.

    python benchmarks/lib/programs/paced_engine.py --port PORT --pace SECONDS --rows ROWS

It answers `POST /v1/completions` with `max_tokens` tokens. Requests without a row wait for one in their order.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKEN = {"choices": [{"index": 0, "text": "a "}]}


def paced_app(pace_s: float, rows: int) -> Starlette:
    free_rows = asyncio.Semaphore(rows)

    async def completions(request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(events(body["max_tokens"]), media_type="text/event-stream")

    async def events(tokens: int) -> AsyncIterator[str]:
        """Each token has a time of its own, so that late ones do not delay those after them."""
        async with free_rows:
            clock = asyncio.get_running_loop().time
            began = clock()
            for number in range(1, tokens + 1):
                await asyncio.sleep(max(0.0, began + number * pace_s - clock()))
                yield _event(TOKEN)
        yield _event({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": tokens}})
        yield "data: [DONE]\n\n"

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


def _event(body: object) -> str:
    return f"data: {json.dumps(body)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds between two tokens of a row")
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    app = paced_app(arguments.pace, arguments.rows)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
