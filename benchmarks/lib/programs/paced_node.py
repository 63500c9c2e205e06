"""`mlx_parallm_serve` with an engine that answers at a fixed pace, from a limited number of rows.

    python benchmarks/lib/programs/paced_node.py --pace SECONDS --rows ROWS [--passes-on] FLAG ...

The flags are those of `mlx_parallm_serve`. All but the engine is the real server, also as a node of a cluster. The text
of each token is the time at which it was made, in `time.perf_counter` seconds, which all processes of a machine share.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import FastAPI

from mlx_parallm.app import serve as serving
from mlx_parallm.app.build import Served
from mlx_parallm.cli.main import serve
from mlx_parallm.core.engine import EngineClient
from mlx_parallm.core.requests import (
    Event,
    FinishReason,
    GenerationRequest,
    RequestFinished,
    RequestStarted,
    SequenceOutput,
)
from mlx_parallm.extras.cluster.http.counted import CountedEngine

BUSY_TOKENS = 1 << 40
"""So many tokens under way that every other node has less to do."""


class PacedEngine(CountedEngine):
    """Requests without a row wait for one in their order."""

    def __init__(self, engine: EngineClient, pace_s: float, rows: int) -> None:
        super().__init__(engine)
        self._pace_s = pace_s
        self._free_rows = asyncio.Semaphore(rows)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Each token has a time of its own, so that late ones do not delay those after them."""
        arrived, tokens = time.monotonic(), request.stopping.max_tokens
        async with self._free_rows:
            began = time.monotonic()
            yield RequestStarted(arrived, began)
            for number in range(1, tokens + 1):
                await asyncio.sleep(max(0.0, began + number * self._pace_s - time.monotonic()))
                ends = FinishReason.LENGTH if number == tokens else None
                yield SequenceOutput(0, (1,), f"{time.perf_counter():.6f} ", finish_reason=ends)
        prompt_tokens = sum(map(len, request.prompts))
        yield RequestFinished(prompt_tokens, tokens, arrived, began, began + self._pace_s, time.monotonic())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pace", type=float, required=True, help="seconds between two tokens of a row")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--passes-on", action="store_true", help="leave all requests to the other nodes")
    arguments, flags = parser.parse_known_args()

    class PacedServer(serving.IntegratedServer):
        async def _load(self) -> Served:
            served = await super()._load()
            return replace(served, engine=PacedEngine(served.engine, arguments.pace, arguments.rows))

        def _create_app(self, *parts: Any) -> FastAPI:
            app = super()._create_app(*parts)
            if arguments.passes_on:
                app.state.services.cluster.own.load.tokens += BUSY_TOKENS
            return app

    serving.IntegratedServer = PacedServer  # type: ignore[misc]
    return serve(flags)


if __name__ == "__main__":
    sys.exit(main())
