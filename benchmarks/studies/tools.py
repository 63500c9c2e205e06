"""Checks tool calls of the bundled model through a real server, and what it costs to enforce them.

    python benchmarks/studies/tools.py [--quick] [--repeats 5] [--only choices throughput] [--out FILE]

`choices`: each prompt is sent with `tool_choice` auto, none, required, and a named tool, greedily, once streamed and
once not. A cell of the table shows the calls. Every call must name a tool of the request. Where calls are enforced, the
arguments must follow the schema. `required` and a named tool must call, `none` must not, and the streamed answer must
equal the other.

`throughput`: 16 streams at once, each of which must call a tool of its own whose arguments are a list without an end,
compared with 16 streams of text with the same tools. So masks and the reading of calls are both counted. It takes about
4 minutes on two cores. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from rich.table import Table

from benchmarks.lib import machine, peers, report
from benchmarks.lib.figures import Figure, errors, ratios, reported
from benchmarks.lib.load import HOST

TOKENS, LIMIT_S, AT_ONCE = 96, 600.0, 8
PARTS = ("choices", "throughput")
FREE, ENFORCED = "free", "tools enforced"
ROWS, ROW_TOKENS, KEPT = 16, 128, 0.9
Rates = dict[str, list[float]]
"""Tokens per second in each repeat."""
CHOICES = ("auto", "none", "required", "named")
PROMPTS = (
    "What is the weather in Paris?",
    "How warm will it be in Oslo tomorrow, in celsius?",
    "What is 12 times 7?",
    "Add 3 and 4, then tell me the weather in Rome.",
    "Remind me to call Ann at noon.",
    "Write a haiku about the sea.",
)


def _tool(name: str, about: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = (
    _tool(
        "get_weather",
        "The weather in a city",
        ["city"],
        city={"type": "string", "maxLength": 40},
        unit={"enum": ["celsius", "fahrenheit"]},
    ),
    _tool(
        "calculate",
        "Adds or multiplies two numbers",
        ["operation", "a", "b"],
        operation={"enum": ["add", "multiply"]},
        a={"type": "integer", "minimum": -999, "maximum": 999},
        b={"type": "integer", "minimum": -999, "maximum": 999},
    ),
    _tool("remind", "Reminds the user", ["what"], what={"type": "string", "maxLength": 60}),
)
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
NAMED = {"type": "function", "function": {"name": "calculate"}}


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt with one `tool_choice`. `calls`: name and arguments (JSON text) of each call; `fault`: what is
    wrong."""

    prompt: str
    choice: str
    content: str | None
    calls: tuple[tuple[str, str], ...]
    finish_reason: str
    fault: str = ""

    @property
    def shown(self) -> str:
        calls = " ".join(f"{name}({arguments})" for name, arguments in self.calls)
        return self.fault or calls or repr((self.content or "")[:30])


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kills all child processes, as Ctrl-C does
    before = machine.describe()
    machine.warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="tools_benchmark_") as logs:
        cells, rates = asyncio.run(measure(Path(logs), arguments))
    judged = [*(_judged(cells) if cells else ()), *(_of_rates(rates) if rates else ())]
    report.show(judged, *([_table(cells)] if cells else []))
    results = {"cells": [asdict(cell) for cell in cells], "rates": rates}
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments), **results}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


async def measure(logs: Path, arguments: argparse.Namespace) -> tuple[list[Cell], Rates]:
    """The cells and the rates of the chosen parts."""
    cells: list[Cell] = []
    rates: Rates = {}
    async with peers.our_server(None, logs) as server:
        with server.awake():
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}", timeout=LIMIT_S) as http:
                if "choices" in arguments.only:
                    places = asyncio.Semaphore(AT_ONCE)
                    prompts = PROMPTS[:2] if arguments.quick else PROMPTS
                    asked = [_cell(http, places, prompt, choice) for prompt in prompts for choice in CHOICES]
                    cells = await asyncio.gather(*asked)
                if "throughput" in arguments.only:
                    rates = await _rates(http, 1 if arguments.quick else arguments.repeats)
    return cells, rates


async def _rates(http: httpx.AsyncClient, repeats: int) -> Rates:
    rates: Rates = {FREE: [], ENFORCED: []}
    for repeat in range(repeats + 1):  # the first one warms up, and leaves the prompts in the prefix cache
        for kind in rates:
            started = time.perf_counter()
            tokens = await asyncio.gather(*(_row(http, row, kind == ENFORCED) for row in range(ROWS)))
            rate = sum(tokens) / (time.perf_counter() - started)
            if repeat:
                rates[kind].append(rate)
                print(f"  {kind:<14} {rate:6.1f} tok/s", flush=True)
    return rates


async def _row(http: httpx.AsyncClient, row: int, enforced: bool) -> int:
    """The tokens of one streamed answer, which ends at the limit."""
    item = {"type": "object", "properties": {f"name_{row}": {"type": "string"}, "count": {"type": "integer"}}}
    item |= {"required": list(item["properties"]), "additionalProperties": False}
    tool = _tool(f"record_{row}", "Records items", ["items"], items={"type": "array", "items": item, "minItems": 99})
    body = {
        "messages": [{"role": "user", "content": f"Record {row} things that are in a kitchen."}],
        "tools": [tool],
        "tool_choice": "required" if enforced else "none",
        "max_tokens": ROW_TOKENS,
        "ignore_eos": not enforced,
        "seed": row,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = await http.post("/v1/chat/completions", json=body)
    *_, last, _done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]


async def _cell(http: httpx.AsyncClient, places: asyncio.Semaphore, prompt: str, choice: str) -> Cell:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "tools": TOOLS,
        "tool_choice": NAMED if choice == "named" else choice,
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    async with places:
        whole = await http.post("/v1/chat/completions", json=body)
        stream = await http.post("/v1/chat/completions", json={**body, "stream": True})
    if whole.status_code != 200 or stream.status_code != 200:
        return Cell(prompt, choice, None, (), "", f"failed: {whole.text[:200]}")
    said = _of_whole(whole.json())
    cell = Cell(prompt, choice, *said)
    print(f"  {choice:<9} {prompt}: {cell.shown}", flush=True)
    faults = [*_faults(cell), *([] if _of_stream(stream.text) == said else ["a stream is not what the whole is"])]
    return Cell(prompt, choice, *said, "; ".join(faults))


def _of_whole(answer: dict[str, Any]) -> tuple[str | None, tuple[tuple[str, str], ...], str]:
    choice = answer["choices"][0]
    made = choice["message"].get("tool_calls", [])
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in made)
    return choice["message"]["content"], calls, choice["finish_reason"]


def _of_stream(text: str) -> tuple[str | None, tuple[tuple[str, str], ...], str]:
    content: str | None = None
    calls: dict[int, list[str]] = {}
    reason = ""
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            reason = choice["finish_reason"] or reason
            if delta.get("content") is not None:
                content = (content or "") + delta["content"]
            for call in delta.get("tool_calls", ()):
                known = calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name", "")
                known[1] += call["function"]["arguments"]
    made = tuple((name, arguments) for name, arguments in calls.values())
    return (content or None if made else content), made, reason


def _faults(cell: Cell) -> Iterator[str]:
    if cell.choice in ("required", "named") and not cell.calls:
        yield "no call"
    if cell.choice == "none" and cell.calls:
        yield "a call"
    if cell.choice == "named" and any(name != NAMED["function"]["name"] for name, _ in cell.calls):
        yield "another tool than the named one"
    whole = cell.calls[:-1] if cell.finish_reason == "length" else cell.calls  # the last one may be cut off
    for name, arguments in whole:
        try:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        except (KeyError, ValueError, jsonschema.ValidationError):
            # With auto, only the tool's name is enforced.
            if cell.choice != "auto" or name not in SCHEMAS:
                yield f"{name}({arguments}) is not what its schema allows"


def _judged(cells: Sequence[Cell]) -> Iterator[Figure]:
    for choice in CHOICES:
        mine = [cell for cell in cells if cell.choice == choice]
        called = Figure(f"share of prompts with a call, {choice}", "", *reported([_share(mine)]))
        yield called
        yield errors(f"cells at fault, {choice}", sum(bool(cell.fault) for cell in mine))


def _of_rates(rates: Rates) -> Iterator[Figure]:
    kept = ratios(rates[ENFORCED], rates[FREE])
    yield Figure("16 rows with tools enforced against 16 free ones", "x", kept, kept.median, KEPT, at_least=True)
    yield Figure("16 rows with tools enforced", "tok/s", *reported(rates[ENFORCED]))
    yield Figure("16 free rows", "tok/s", *reported(rates[FREE]))


def _share(cells: Sequence[Cell]) -> float:
    return sum(bool(cell.calls) for cell in cells) / len(cells)


def _table(cells: Sequence[Cell]) -> Table:
    table = Table("prompt", *CHOICES, title="What was called, or else said")
    for prompt in dict.fromkeys(cell.prompt for cell in cells):
        table.add_row(prompt, *(cell.shown for cell in cells if cell.prompt == prompt))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two prompts, one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "tools.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
