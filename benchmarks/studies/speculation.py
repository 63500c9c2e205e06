"""Measures what drafted tokens gain: two servers, with and without speculation, answer the same requests in turn.

    python benchmarks/studies/speculation.py [--quick] [--repeats 3] [--only copying editing new same json draft head]
        [--out FILE]

copying  a text is to be continued that was written twice before
editing  a letter is to be written again with other names in it, after three such letters
new      a chat about something new, which repeats little
json     an object whose keys a JSON schema demands
same     as new, and neither server speculates: how far two equal servers differ
draft    a chat, for which the bundled model's own first layers draft; they were not trained for that, so without an aim
head     text without meaning, for which a prediction head drafts that is right for 7 of 10 tokens (`programs.head`),
         without an aim

One row for each of them, and up to 16 rows for copying, editing and new. All requests are greedy, with as many tokens
on both sides. Compared are tokens per second of all rows together, and the texts: they must be equal, except after a
token whose two best candidates are closer than rounding. It takes about 20 minutes, 6 with --quick. Nothing else should
run on the machine meanwhile.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, errors, ratios, reported
from benchmarks.lib.load import Body, closed_loop, get, greedy
from benchmarks.lib.peers import Peer, cancelled_by_sigterm, our_server
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.throughput import warm_up

KINDS = ("copying", "editing", "new", "json", "same", "draft", "head")
BATCHES: dict[str, tuple[int, ...]] = dict.fromkeys(KINDS, (1,)) | {
    "copying": (1, 8, 16),
    "editing": (1, 8),
    "new": (1, 4, 8, 16),
    "same": (1, 8),
}
"""Rows that are measured together, for each kind."""

TOKENS, QUICK_TOKENS = 96, 32
LEAST = {"copying": 1.7, "editing": 1.7, "new": 0.99, "json": 1.3}
"""Least gain of one row. With more rows it is 0.99 for all. The others have no aim."""

NEVER_BELOW = 0.99

LETTER = """\
Dear {name},

the {thing} that you ordered from us on Monday was sent to your house in {place} this morning. It should be with you \
before the end of the week. If the {thing} does not arrive, please write to us, and we will send another one to {place}.

Your friends at the shop

"""
NAMES = ("Anna", "Peter", "Maria", "Thomas", "Laura", "Robert", "Emma", "Henry")
THINGS = ("lamp", "chair", "table", "clock", "mirror", "carpet", "kettle", "pillow")
PLACES = ("Rome", "Paris", "London", "Berlin", "Madrid", "Vienna", "Dublin", "Oslo")

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
class Side:
    """One server at one point: tokens per second in each repeat, and per second of its processor time, which other
    programs change less; and its drafted tokens: computed, and right."""

    rates: list[float] = field(default_factory=list)
    of_processor: list[float] = field(default_factory=list)
    drafted: int = 0
    right: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Point:
    """The measurements of one kind of text at one number of rows. `different`: texts that were not equal."""

    kind: str
    rows: int
    off: Side = field(default_factory=Side)
    on: Side = field(default_factory=Side)
    tokens: int = 0
    different: int = 0


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    machine.warn_if_busy()
    before = machine.describe()
    points = asyncio.run(cancelled_by_sigterm(_measure(arguments)))
    figures = [figure for point in points for figure in _figures(point)]
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
    name = f"{point.kind}, {point.rows} {'row' if point.rows == 1 else 'rows'}"
    gain = ratios(point.on.rates, point.off.rates)
    of_processor = ratios(point.on.of_processor, point.off.of_processor)
    least = LEAST.get(point.kind) if point.rows == 1 or point.kind == "same" else NEVER_BELOW
    drafted, right = point.on.drafted / point.tokens, point.on.right / max(point.on.drafted, 1)
    yield Figure(f"{name}: without speculation", "tok/s", *reported(point.off.rates))
    yield Figure(f"{name}: gain", "x", gain, gain.median)
    yield Figure(f"{name}: gain in processor time", "x", of_processor, of_processor.median, least, at_least=True)
    yield Figure(f"{name}: drafted tokens computed per token", "", *reported([drafted]))
    yield Figure(f"{name}: share of them that was right", "", *reported([right]))
    yield Figure(f"{name}: texts that differ", "", *reported([point.different]))
    yield errors(f"{name}: errors", len(point.off.errors) + len(point.on.errors))


async def _measure(arguments: argparse.Namespace) -> list[Point]:
    tokens, repeats = (QUICK_TOKENS, 1) if arguments.quick else (TOKENS, arguments.repeats)
    measured: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="speculation_benchmark_") as name:
        if "draft" in arguments.only:
            subprocess.run([sys.executable, "-m", "benchmarks.lib.programs.drafts", name], check=True)
        if "head" in arguments.only:
            subprocess.run([sys.executable, "-m", "benchmarks.lib.programs.head", f"{name}/head"], check=True)
        for number, pair in enumerate(_pairs(Path(name))):
            points = [Point(kind, rows) for kind in pair.kinds if kind in arguments.only for rows in BATCHES[kind]]
            if points:
                await _measure_pair(pair, points, _folder(name, str(number)), tokens, repeats)
            measured += points
    return measured


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers that answer these kinds of requests, and the flags of the one with speculation. `model`: None means
    the bundled one."""

    kinds: tuple[str, ...]
    on: tuple[str, ...]
    model: Path | None = None


def _pairs(folder: Path) -> list[Pair]:
    """`folder`: what `programs.drafts` and `programs.head` have written."""
    return [
        Pair(("copying", "editing", "new", "json"), ("--speculation", "auto")),
        Pair(("same",), ("--speculation", "off")),
        Pair(("draft",), ("--speculation", "draft", "--draft-model", str(folder / "first_layers"))),
        Pair(("head",), ("--speculation", "auto"), folder / "head"),
    ]


async def _measure_pair(pair: Pair, points: list[Point], logs: Path, tokens: int, repeats: int) -> None:
    both = ("--no-prefix-cache",)
    async with (
        our_server(pair.model, _folder(logs, "off"), (*both, "--speculation", "off")) as off,
        our_server(pair.model, _folder(logs, "on"), (*both, *pair.on)) as on,
    ):
        for server in (off, on):
            await warm_up(server)
        for repeat in range(repeats):
            for point in points:
                await _compare(point, off, on, repeat, tokens)


def _folder(parent: str | Path, name: str) -> Path:
    folder = Path(parent) / name
    folder.mkdir()
    return folder


async def _compare(point: Point, off: Peer, on: Peer, repeat: int, tokens: int) -> None:
    """Lets both servers answer the same requests. The one that goes first alternates."""
    bodies = [_body(point.kind, number, repeat, tokens) for number in range(max(point.rows, 2))]
    turns = [(off, point.off), (on, point.on)]
    texts = [await _answers(*turn, bodies, point) for turn in (turns if repeat % 2 == 0 else reversed(turns))]
    point.different += sum(one != other for one, other in zip(*texts, strict=True))


async def _answers(server: Peer, side: Side, bodies: list[Body], point: Point) -> list[str]:
    with server.awake():
        before, cpu = await _counts(server), machine.processor_seconds(server.process.pid)
        load = await closed_loop(server.port, bodies, point.rows)
        after, cpu = await _counts(server), machine.processor_seconds(server.process.pid) - cpu
    side.rates.append(load.rate)
    side.of_processor.append(load.tokens / cpu)
    side.drafted += after[0] - before[0]
    side.right += after[1] - before[1]
    side.errors += load.errors
    point.tokens += load.tokens if side is point.on else 0
    print(
        f"  {point.kind}, {point.rows} rows, {'on' if side is point.on else 'off'}: {load.rate:.1f} tok/s, "
        f"{load.tokens / cpu:.1f} per second of the processor",
        flush=True,
    )
    return [stream.text for stream in sorted(load.streams, key=lambda stream: json.dumps(stream.body))]


async def _counts(server: Peer) -> tuple[int, int]:
    """The drafted tokens that the server has computed so far, and those that were right."""
    lines = (line.rsplit(" ", 1) for line in (await get(server.port, "/metrics")).decode().splitlines() if " " in line)
    values = {name.split("{")[0]: value for name, value in lines}
    prefix = "mlx_parallm_spec_decode_num_"
    drafted, right = (int(float(values[f"{prefix}{name}_tokens_total"])) for name in ("draft", "accepted"))
    return drafted, right


def _body(kind: str, number: int, repeat: int, tokens: int) -> Body:
    common = {**greedy(tokens), "ignore_eos": True}
    [text] = short_prompts(1, f"{kind} {number} {repeat}")
    if kind == "copying":
        text = ". ".join(short_prompts(3, f"{number} {repeat}"))
        return {**common, "prompt": f"{text}\n\n{text}\n\n{text[: len(text) // 6]}"}
    if kind == "editing":
        *letters, last = (_letter(number + 2 * repeat + place) for place in range(4))
        return {**common, "prompt": "".join(letters) + last[: last.index(" that ")]}
    if kind == "json":
        asked = {"role": "user", "content": f"What is the weather in {text.split()[0]}? Answer in JSON."}
        schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
        return {**greedy(max(tokens, TOKENS)), "messages": [asked], "response_format": schema}
    return {**common, "messages": [{"role": "user", "content": f"Tell me a story about: {text}"}]}


def _letter(number: int) -> str:
    name, thing, place = (words[number % len(words)] for words in (NAMES, THINGS, PLACES))
    return LETTER.format(name=name, thing=thing, place=place)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one repeat of {QUICK_TOKENS} tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "speculation.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
