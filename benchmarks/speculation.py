"""Measures what guessed tokens gain: two servers, with and without speculation, answer the same requests in turn.

    python benchmarks/speculation.py [--repeats 3] [--only copying editing new json] [--rows 1 8 16] [--out FILE]

copying  a text is to be continued that was written twice before
editing  a program is to be written again with another name in it
new      a chat about something new, which repeats little
json     an object whose keys a JSON schema demands

All requests are greedy, with as many tokens on both sides. Compared are tokens per second of all rows together, and the
texts: they must be equal, except after a token whose two best candidates are closer than rounding. It takes about 15
minutes. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from lib import machine, report
from lib.figures import Figure, ratios, reported
from lib.load import Body, closed_loop, get, greedy
from lib.peers import Peer, cancelled_by_sigterm, our_server
from lib.prompts import short_prompts
from lib.throughput import warm_up

HERE = Path(__file__).parent
KINDS = ("copying", "editing", "new", "json")
TOKENS = 96
LEAST = {"copying": 1.7, "editing": 1.7, "new": 0.97, "json": 1.3}
"""Least gain of one row. With more rows it is 0.97 for all."""

NEVER_BELOW = 0.97

PROGRAM = """\
def total_{name}(orders, customers):
    result = {{}}
    for order in orders:
        customer = customers.get(order.customer_id)
        if customer is None:
            raise KeyError(f"unknown customer {{order.customer_id}}")
        result.setdefault(customer.name, 0)
        result[customer.name] += order.price * order.count
    return result
"""

SCHEMA = {
    "type": "object",
    "properties": {
        "temperature_in_celsius": {"type": "integer"},
        "chance_of_rain_in_percent": {"type": "integer"},
        "description_of_the_weather": {"type": "string", "maxLength": 40},
        "direction_of_the_wind": {"enum": ["north", "east", "south", "west"]},
    },
    "required": [
        "temperature_in_celsius",
        "chance_of_rain_in_percent",
        "description_of_the_weather",
        "direction_of_the_wind",
    ],
    "additionalProperties": False,
}


@dataclass(slots=True)
class Point:
    """Tokens per second at one number of rows, one value per repeat. `different`: texts that were not equal."""

    kind: str
    rows: int
    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    different: int = 0
    errors: int = 0


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    machine.warn_if_busy()
    before = machine.describe()
    points, accepted = asyncio.run(cancelled_by_sigterm(_measure(arguments)))
    figures = [figure for point in points for figure in _figures(point)]
    figures.append(Figure("guessed tokens that were right", "", *reported([accepted])))
    report.show(figures)
    record = {
        "machine": before,
        "setting": report.setting(arguments),
        "points": [asdict(point) for point in points],
    }
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _figures(point: Point) -> Iterator[Figure]:
    name = f"{point.kind}, {point.rows} rows"
    gain = ratios(point.on, point.off)
    yield Figure(f"{name}: without", "tok/s", *reported(point.off))
    yield Figure(
        f"{name}: gain", "x", gain, gain.median, LEAST[point.kind] if point.rows == 1 else NEVER_BELOW, at_least=True
    )
    yield Figure(f"{name}: texts that differ", "", *reported([point.different]))
    yield Figure(f"{name}: errors", "", *reported([point.errors]), limit=0)


async def _measure(arguments: argparse.Namespace) -> tuple[list[Point], float]:
    points = [Point(kind, rows) for kind, rows in product(arguments.only, arguments.rows)]
    with tempfile.TemporaryDirectory(prefix="speculation_benchmark_") as name:
        folders = [Path(name) / side for side in ("off", "on")]
        for folder in folders:
            folder.mkdir()
        async with (
            our_server(None, folders[0], ("--no-prefix-cache", "--speculation", "off")) as off,
            our_server(None, folders[1], ("--no-prefix-cache", "--speculation", "auto")) as on,
        ):
            for server in (off, on):
                await warm_up(server)
            for repeat, point in product(range(arguments.repeats), points):
                bodies = [_body(point.kind, number, repeat) for number in range(2 * point.rows)]
                sides = [(off, point.off), (on, point.on)]
                texts = {}
                for server, rates in sides if repeat % 2 == 0 else reversed(sides):
                    texts[server.port] = await _answers(server, bodies, point, rates)
                point.different += sum(a != b for a, b in zip(*texts.values(), strict=True))
            with on.awake():
                return points, _accepted((await get(on.port, "/metrics")).decode())


async def _answers(server: Peer, bodies: list[Body], point: Point, rates: list[float]) -> list[str]:
    with server.awake():
        load = await closed_loop(server.port, bodies, point.rows)
    rates.append(load.rate)
    point.errors += len(load.errors)
    return [stream.text for stream in sorted(load.streams, key=lambda stream: json.dumps(stream.body))]


def _accepted(metrics: str) -> float:
    counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("mlx_parallm_spec_decode"))
    values = {name.split("{")[0]: float(value) for name, value in counts.items()}
    prefix = "mlx_parallm_spec_decode_num_"
    return values[f"{prefix}accepted_tokens_total"] / max(values[f"{prefix}draft_tokens_total"], 1.0)


def _body(kind: str, number: int, repeat: int) -> Body:
    common = {**greedy(TOKENS), "ignore_eos": True}
    [text] = short_prompts(1, f"{kind} {number} {repeat}")
    if kind == "copying":
        text = ". ".join(short_prompts(3, f"{number} {repeat}"))
        return {**common, "prompt": f"{text}\n\n{text}\n\n{text[: len(text) // 6]}"}
    if kind == "editing":
        program = PROGRAM.format(name=f"{number}_{repeat}")
        asked = f"Write this function again, with the name total_price:\n\n```python\n{program}```"
        return {**common, "messages": [{"role": "user", "content": asked}]}
    if kind == "json":
        asked = {"role": "user", "content": f"What is the weather in {text.split()[0]}? Answer in JSON."}
        schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
        return {**greedy(TOKENS), "messages": [asked], "response_format": schema}
    return {**common, "messages": [{"role": "user", "content": f"Tell me a story about: {text}"}]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 16))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "speculation.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
