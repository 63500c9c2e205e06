# /// script
# requires-python = ">=3.11"
# dependencies = ["aiohttp>=3.12,<4"]
# ///
"""aiohttp: `with_aiohttp.py BASE_URL ASKED PART…` prints one JSON object, an answer for each part."""

import asyncio
import json
import sys
from collections import Counter

import aiohttp

URL, ASKED = sys.argv[1], json.loads(sys.argv[2])
CLIENTS, IDLE_S = 20, 6


async def idle():
    """Connections that were idle for longer than many servers keep them, used again."""
    counts, trace = Counter(), aiohttp.TraceConfig()

    async def created(*_):
        counts["created"] += 1

    async def reused(*_):
        counts["reused"] += 1

    trace.on_connection_create_end.append(created)
    trace.on_connection_reuseconn.append(reused)
    async with aiohttp.ClientSession(trace_configs=[trace]) as session:
        await asyncio.gather(*(ask(session) for _ in range(CLIENTS)))
        await asyncio.sleep(IDLE_S)
        await asyncio.gather(*(ask(session) for _ in range(CLIENTS)))
    return counts


async def ask(session):
    asked = {"model": ASKED["model"], "prompt": ASKED["prompt"]}
    async with session.post(f"{URL.removesuffix('/v1')}/tokenize", json=asked, raise_for_status=True) as answer:
        return await answer.json()


print(json.dumps({part: asyncio.run(globals()[part]()) for part in sys.argv[3:]}))
