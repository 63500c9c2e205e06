"""Measures what embeddings cost rows that decode, and how well embeddings and rankings find the answer to a question.

    python benchmarks/studies/embeddings.py [--repeats 3] [--only beside finding] [--model DIR] [--out FILE]

`beside`: 100 texts of 32 tokens are embedded while 16 rows decode. Each repeat measures the rows' rate alone, beside
the embeddings, and alone again, because longer rows are slower; the rate beside is compared with the mean of the other
two. Each text is a request of its own, and all are sent at once. It takes about 2 minutes a repeat on two cores, and
nothing else should run on the machine meanwhile. `finding`: 20 questions, each with one answer among 20 sentences; how
often it comes first. It does not depend on the machine's speed.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported, spread
from benchmarks.lib.load import Stream, post_json
from benchmarks.lib.peers import Peer, cancelled_by_sigterm, our_server
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.questions import QUESTIONS
from benchmarks.lib.throughput import body, warm_up

PARTS = ("beside", "finding")
R = TypeVar("R")
ROWS, ROW_TOKENS, SETTLED_TOKENS = 16, 4000, 8
TEXTS, TEXT_TOKENS = 100, 32
ALONE_S = 15.0
LEAST_RATIO, MOST_S = 0.8, 90.0
LIMIT_S = 600
TICK_S = 0.05


# -- beside rows that decode ---------------------------------------------------------------------


@dataclass(slots=True)
class Beside:
    """One value for each repeat: tokens per second of all rows and the ratio of the two, and the seconds until all
    texts were embedded beside the rows, and with nothing else to do."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    idle_seconds: list[float] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        """The limits apply to the worst repeat."""
        ratio, seconds = spread(self.ratios), spread(self.seconds)
        yield Figure(f"{ROWS} rows alone", "tok/s", *reported(self.alone))
        yield Figure(f"{ROWS} rows beside {TEXTS} embeddings", "tok/s", *reported(self.beside))
        yield Figure("rate beside embeddings", "x", ratio, ratio.low, LEAST_RATIO, at_least=True)
        yield Figure(
            f"{TEXTS} embeddings of {TEXT_TOKENS} tokens beside {ROWS} rows", "s", seconds, seconds.high, MOST_S
        )
        yield Figure("the same with nothing else to do", "s", *reported(self.idle_seconds))


async def beside(model: Path | None, logs: Path, repeats: int) -> Beside:
    found = Beside()
    async with our_server(model, logs) as peer, asyncio.timeout(LIMIT_S * repeats):
        await warm_up(peer)
        with peer.awake():
            for repeat in range(repeats):
                found.idle_seconds.append(await _embed_all(peer, _texts(f"idle {repeat}")))
                await _beside_rows(peer, _texts(f"beside {repeat}"), f"rows {repeat}", found)
                print(f"  {found.ratios[-1]:.2f} x, {found.seconds[-1]:.1f} s", flush=True)
    return found


async def _beside_rows(peer: Peer, texts: Sequence[list[int]], seed: str, found: Beside) -> None:
    """Measures one repeat. The rows are aborted afterwards."""
    streams = [
        Stream(peer.port, {**body(text, ROW_TOKENS), "ignore_eos": True, "return_token_ids": True})
        for text in short_prompts(ROWS, seed)
    ]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(stream.run()) for stream in streams]
        while any(len(stream.arrivals) < SETTLED_TOKENS for stream in streams):
            await asyncio.sleep(TICK_S)
        before = await _rate_alone(streams)
        started = time.perf_counter()
        found.seconds.append(await _embed_all(peer, texts))
        found.beside.append(_rate(streams, started, time.perf_counter()))
        found.alone.append((before + await _rate_alone(streams)) / 2)
        for task in running:
            task.cancel()
    found.ratios.append(found.beside[-1] / found.alone[-1])


async def _rate_alone(streams: Sequence[Stream]) -> float:
    started = time.perf_counter()
    await asyncio.sleep(ALONE_S)
    return _rate(streams, started, time.perf_counter())


def _rate(streams: Sequence[Stream], start: float, stop: float) -> float:
    """Tokens per second of all streams between two times. Each event has one token."""
    return sum(start < at <= stop for stream in streams for at in stream.arrivals) / (stop - start)


async def _embed_all(peer: Peer, texts: Sequence[list[int]]) -> float:
    """Seconds until each text has its embedding."""
    started = time.perf_counter()
    bodies = [{"input": text, "encoding_format": "base64"} for text in texts]
    answers = await asyncio.gather(*(post_json(peer.port, "/v1/embeddings", each) for each in bodies))
    assert all(answer["usage"]["prompt_tokens"] == TEXT_TOKENS for answer in answers)
    return time.perf_counter() - started


def _texts(seed: str) -> list[list[int]]:
    """Token ids that every vocabulary has. No two texts begin alike."""
    rng = random.Random(seed)
    return [rng.choices(range(100, 10_000), k=TEXT_TOKENS) for _ in range(TEXTS)]


# -- finding answers -----------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """The share of questions whose answer comes first, by how the sentences are ordered."""

    first: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, scores: NDArray[np.float64]) -> None:
        """`scores`: [questions, sentences], of which those on the diagonal belong together. Of k best ones, each comes
        first with probability 1 / k."""
        best = scores == scores.max(axis=1, keepdims=True)
        self.first[name] = float((best.diagonal() / best.sum(axis=1)).mean())
        print(f"  {self.first[name]:.2f} {name}", flush=True)

    def figures(self) -> Iterator[Figure]:
        for name, share in self.first.items():
            yield Figure(f"answer first: {name}", "", *reported([share]))


async def finding(model: Path | None, logs: Path) -> Found:
    found, asked, answers = Found(), list(QUESTIONS), list(QUESTIONS.values())
    found.add("common words", np.array([[len(_words(a) & _words(b)) for b in answers] for a in asked], float))
    async with our_server(model, logs) as peer:
        with peer.awake():
            for pooling in ("last", "mean"):
                vectors = await _vectors(peer, [*asked, *answers], pooling)
                found.add(f"{pooling} pooling", _cosines(vectors))
                found.add(f"{pooling} pooling, less the mean vector", _cosines(vectors - vectors.mean(axis=0)))
            found.add("rerank", np.array([await _relevance(peer, question, answers) for question in asked]))
    return found


async def _vectors(peer: Peer, texts: Sequence[str], pooling: str) -> NDArray[np.float64]:
    answer = await post_json(peer.port, "/v1/embeddings", {"input": texts, "pooling": pooling})
    return np.array([item["embedding"] for item in answer["data"]])


def _cosines(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """[2n, D], questions and then sentences → [n, n]."""
    asked, answers = np.split(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), 2)
    return asked @ answers.T


async def _relevance(peer: Peer, question: str, documents: Sequence[str]) -> list[float]:
    answer = await post_json(peer.port, "/v1/rerank", {"query": question, "documents": documents})
    ranked = sorted(answer["results"], key=lambda result: result["index"])
    return [result["relevance_score"] for result in ranked]


def _words(text: str) -> set[str]:
    return set(text.lower().replace(",", "").strip(".?").split())


# -- the program ---------------------------------------------------------------------------------


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    machine.warn_if_busy()
    measured: dict[str, Beside | Found] = {}
    with tempfile.TemporaryDirectory(prefix="embeddings_benchmark_") as folder:
        for name in arguments.only:
            print(name, flush=True)
            if name == "beside":
                measured[name] = _run(beside(arguments.model, Path(folder), arguments.repeats))
            else:
                measured[name] = _run(finding(arguments.model, Path(folder)))
    figures = [figure for part in measured.values() for figure in part.figures()]
    report.show(figures)
    setting = {"repeats": arguments.repeats, "only": arguments.only, "model": str(arguments.model or "bundled")}
    record = {name: asdict(part) for name, part in measured.items()}
    report.write(arguments.out, {"machine": before, "setting": setting, **record}, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _run(part: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(cancelled_by_sigterm(part))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", type=Path, help="a model directory; the bundled model without it")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "embeddings.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
