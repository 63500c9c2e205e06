"""`mlx_parallm bench`: how fast a server is, ours or another one with OpenAI's API; or, with --report, this machine."""

from __future__ import annotations

import argparse
import asyncio
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlx_parallm.cli import bench_report
from mlx_parallm.cli.parser import at_least
from mlx_parallm.cli.remote.client import Client, add_request_arguments
from mlx_parallm.cli.table import show, table

if TYPE_CHECKING:
    from mlx_parallm.cli.remote.load import Level, Spread

_COLUMNS = (
    *("at a time", "requests", "failed", "tok/s", "prompt", "answer"),
    *("first token ms", "95 %", "next token ms", "95 %", "whole s"),
)
_WARM_UP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    at_a_time = "Requests at a time; several numbers are measured one after the other. Default: 1 4 16."
    add("--concurrency", type=at_least(1), nargs="+", default=[1, 4, 16], metavar="N", help=at_a_time)
    add("--requests", type=at_least(1), metavar="N", help="Requests of each number. Default: four times as many.")
    words = "Words of a prompt, most of which are one token. Default: %(default)s."
    add("--prompt-words", type=at_least(1), default=128, metavar="N", help=words)
    add("--max-tokens", type=at_least(1), default=64, metavar="N", help="Tokens of an answer. Default: %(default)s.")
    models = "The model or adapter of the requests; of several, requests name them in turn. Default: the server's."
    add("--model", nargs="+", default=[None], metavar="NAME", help=models)
    ends = "Let answers end where the model ends them, for servers that refuse the field ignore_eos."
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help=ends)
    add_request_arguments(parser, bench)
    defaults = vars(parser.parse_args([]))
    bench_report.add_arguments(parser)
    parser.set_defaults(of_a_server={name: defaults[name] for name in defaults.keys() - {"json", "run"}})


def bench(args: Namespace) -> int:
    """Prints a line for each number of requests at a time. The exit status is 1 if a request failed. With --report, see
    `bench_report`.

    Raises:
        ConfigError, ParaLLMError: see `Client`; or the first request failed.
    """
    bench_report.check_arguments(args)
    if args.report is not None:
        return bench_report.bench_report(args)
    client = Client(args)
    levels = asyncio.run(_levels(client, args))
    setting = {"url": client.base, **{name: getattr(args, name) for name in ("prompt_words", "max_tokens", "model")}}
    show(args, {**setting, "levels": [_data(level) for level in levels]}, lambda: _text(client.base, levels))
    return int(any(level.failed for level in levels))


async def _levels(client: Client, args: Namespace) -> list[Level]:
    from mlx_parallm.cli.remote.load import measure

    options: dict[str, Any] = {"temperature": 0, "stream_options": {"include_usage": True}}
    if args.ignore_eos:
        options["ignore_eos"] = True
    short = {**options, "max_tokens": min(args.max_tokens, _WARM_UP_TOKENS)}
    warm_up = await measure(client, args.model, short, args.prompt_words, 1, len(args.model))
    if warm_up.failed:
        return [warm_up]
    options["max_tokens"] = args.max_tokens
    return [
        await measure(client, args.model, options, args.prompt_words, number, args.requests or 4 * number)
        for number in args.concurrency
    ]


def _data(level: Level) -> dict[str, Any]:
    return {**asdict(level), "tokens_per_second": level.tokens_per_second}


def _text(base: str, levels: Sequence[Level]) -> str:
    errors = dict.fromkeys(f"failed: {error}" for level in levels for error in level.errors)
    uncounted = ["the server counts no tokens: each chunk is counted as one"] if _uncounted(levels) else []
    return "\n".join([base, table([_COLUMNS, *map(_row, levels)]), *uncounted, *errors])


def _uncounted(levels: Sequence[Level]) -> bool:
    return any(not level.counted for level in levels)


def _row(level: Level) -> tuple[str, ...]:
    answered = max(1, level.requests - level.failed)
    return (
        *(str(number) for number in (level.concurrency, level.requests, level.failed)),
        f"{level.tokens_per_second:.1f}",
        *(f"{tokens / answered:.0f}" for tokens in (level.prompt_tokens, level.completion_tokens)),
        *_milliseconds(level.first),
        *_milliseconds(level.token),
        "-" if level.whole is None else f"{level.whole.median:.2f}",
    )


def _milliseconds(spread: Spread | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (f"{1000 * spread.median:.0f}", f"{1000 * spread.p95:.0f}")
