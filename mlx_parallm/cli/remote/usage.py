"""`mlx_parallm usage`: what each key of a running server has used."""

from __future__ import annotations

import argparse
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from mlx_parallm.cli.remote.client import Client, add_request_arguments
from mlx_parallm.cli.table import show, table

_COLUMNS = ("key", "role", "requests", "running", "refused", "prompt tokens", "of them cached", "answer tokens")
_FIELDS = ("key", "role", "requests", "running", "refused", "prompt_tokens", "cached_tokens", "completion_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_request_arguments(parser, usage)


def usage(args: Namespace) -> int:
    """Prints what the key has used since the server started; with an admin key, what every key has used."""
    client = Client(args)
    answer = client.ask("/v1/usage")
    with client.reading():
        text = _text(answer)
    return show(args, answer, lambda: text)


def _text(answer: Mapping[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer["since"]))
    rows = [tuple(str(each[field]) for field in _FIELDS) for each in answer["data"]]
    return f"since {since}\n" + (table([_COLUMNS, *rows]) if rows else "no requests yet")
