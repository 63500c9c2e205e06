"""`mlx_parallm forget`: an adapter of a running server, built anew without some of what it has learnt from."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mlx_parallm.cli.client import SERVER, Client
from mlx_parallm.cli.parser import argument, takes
from mlx_parallm.cli.show import JSON, show, table
from mlx_parallm.errors import ConfigError, ParaLLMError

_PATH = "/v1/training/forget"
_SLOW_S = 600.0
"""A large journal is read to find what is to be forgotten."""
_EVERY_S = 1.0


def _moment(text: str) -> float:
    """Unix time of an ISO-8601 time; without an offset, it is the local time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: give a time such as 2026-11-29 or 2026-11-29T18:30") from error


@takes(
    argument("--key", metavar="NAME", help="All that this API key has asked for, given or judged up to now."),
    argument("--trajectory", nargs="+", metavar="ID", help="These collected answers; of an episode, all its turns."),
    argument("--since", type=_moment, metavar="TIME", help="What was sampled or given from then on."),
    argument("--until", type=_moment, metavar="TIME", help="What was sampled or given before then."),
    argument(
        "--from-scratch",
        action="store_true",
        help="Leave out the answers, too, of versions that had learnt from it.",
    ),
    argument("--ignore-floor", action="store_true", help="Make the result live even below gate.eval_floor."),
    argument("--yes", action="store_true", help="Do it. Without this, only what would be done is printed."),
    *SERVER,
    JSON,
)
def forget(args: Namespace) -> int:
    """Prints what an adapter would be built anew without and what would be removed; with --yes, does it.

    Raises:
        ConfigError: not one thing to forget is named.
        ParaLLMError: the server refuses it, or it has failed.
    """
    times = {name: value for name in ("since", "until") if (value := getattr(args, name)) is not None}
    if bool(args.key) + bool(args.trajectory) + bool(times) != 1:
        raise ConfigError("name what to forget: --key, --trajectory, or a time (--since, --until)")
    what = {"key": args.key, "trajectory_ids": args.trajectory, **times, "from_scratch": args.from_scratch}
    body = {name: value for name, value in what.items() if value is not None}
    client = Client(args)
    if not args.yes:
        return client.show(args, _plan_text, _PATH, {**body, "dry_run": True}, _SLOW_S)
    if not args.json:
        client.show(args, _parts_text, _PATH, {**body, "dry_run": True}, _SLOW_S)
    card = client.ask(_PATH, {**body, "ignore_floor": args.ignore_floor}, _SLOW_S)
    with client.reading():
        card = _followed(client, card)
        if card["state"] == "failed":
            raise ParaLLMError(f"failed; this command, or the server's next start, tries it again: {card['reason']}")
        show(args, card, _end_text(card))
        return int(card["state"] == "held")


def _followed(client: Client, card: Mapping[str, Any]) -> Mapping[str, Any]:
    """Waits until it has ended, and shows how far it is on a terminal. It goes on if this is interrupted."""
    while card["state"] in ("rebuilding", "removing"):
        if sys.stderr.isatty():
            line = f"\r{card['state']} {card['lora_adapter']}: {card['done']} of {card['updates']} updates "
            print(line, end="", file=sys.stderr, flush=True)
        time.sleep(_EVERY_S)
        card = client.ask(_PATH)
    return card


def _end_text(card: Mapping[str, Any]) -> str:
    if card["state"] == "held":
        return f"held as it was: {card['reason']}; --ignore-floor makes the rebuilt one live all the same"
    return f"\nforgot {card['what']}; adapters that had learnt from it are rebuilt without it and live"


def _plan_text(plan: Mapping[str, Any]) -> str:
    return f"{_parts_text(plan)}\n\nnothing was changed; --yes does it" if plan["adapters"] else _parts_text(plan)


def _parts_text(plan: Mapping[str, Any]) -> str:
    if not plan["adapters"]:
        return f"nothing is kept of {plan['what']}"
    parts = "\n\n".join(_part_text(part) for part in plan["adapters"])
    rule = f"checkpoints that have learnt from it: {plan['remove_checkpoints']} (checkpointing.remove_forgotten)"
    return f"{parts}\n\n{rule}"


def _part_text(part: Mapping[str, Any]) -> str:
    rows = [("adapter", part["lora_adapter"]), ("answers removed", part["trajectories"])]
    if part["log_lines"]:
        rows.append(("lines of the trajectory log removed", part["log_lines"]))
    if part["unknown"]:
        rows.append(("older updates that may have learnt from it and stay", part["unknown"]))
    if part["problem"]:
        return table([*rows, ("problem", part["problem"])])
    if not part["updates"]:
        return table([*rows, ("updates", "none has learnt from it, so the adapter stays as it is")])
    again = f"{part['again']}, from {part['starts_from']}; they took {part['seconds']:.0f} s"
    rows += [("updates that have learnt from it", part["updates"]), ("updates made again", again)]
    for name in ("removed", "kept"):
        if part[name]:
            rows.append((f"checkpoints {name}", ", ".join(part[name])))
    return table(rows)
