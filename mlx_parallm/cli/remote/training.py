"""`mlx_parallm training`: watches and controls the training of a running server."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlx_parallm.cli.parser import AddCommand
from mlx_parallm.cli.remote.client import Client, add_request_arguments
from mlx_parallm.cli.table import show

_UPDATE_TIMEOUT_S = 3600.0
"""An update, and a rollback, wait for the update that is being made, and for their turns between requests."""
_CONTROLS = {
    "start": "Train this adapter too, from its live version.",
    "stop": "End the training of an adapter, and its lesson. What it has learnt stays, and stays live.",
    "pause": "Stop automatic updates. Trajectories are still collected.",
    "resume": "Restart automatic updates.",
}


def add_commands(add: AddCommand) -> None:
    """Adds the commands."""
    _add_arguments(add("status", "Show the training of an adapter."), status)
    for name, text in _CONTROLS.items():
        _add_arguments(add(name, text), partial(_control, name))
    updating = add("update", "Make an update now, on all complete groups, even if training is paused.")
    updating.add_argument("--checkpoint", metavar="TAG", help="Save the adapter with this tag after the update.")
    _add_arguments(updating, update)
    rolling = add("rollback", "Make an earlier version live, and continue training from it.")
    rolling.add_argument("--to", metavar="CHECKPOINT", help="A checkpoint's name or tag. Default: the best version.")
    _add_arguments(rolling, roll_back)


def _add_arguments(parser: argparse.ArgumentParser, run: Callable[[Namespace], int]) -> None:
    parser.add_argument("--adapter", metavar="NAME", help="A trained adapter. Default: the default adapter.")
    add_request_arguments(parser, run)


def status(args: Namespace) -> int:
    """Prints how far the training of an adapter is."""
    client = Client(args)
    query = f"?lora_adapter={args.adapter}" if args.adapter else ""
    return _show_status(args, client, client.ask(f"/v1/training/status{query}"))


def _control(name: str, args: Namespace) -> int:
    client = Client(args)
    return _show_status(args, client, client.ask(f"/v1/training/{name}", _named(args), _UPDATE_TIMEOUT_S))


def roll_back(args: Namespace) -> int:
    """Goes back to a checkpoint, or to the best version."""
    client = Client(args)
    body = _named(args) | ({"to": args.to} if args.to else {})
    return _show_status(args, client, client.ask("/v1/training/rollback", body, _UPDATE_TIMEOUT_S))


def update(args: Namespace) -> int:
    """Makes one update and prints what became of it."""
    client = Client(args)
    body = _named(args) | ({"checkpoint_name": args.checkpoint} if args.checkpoint else {})
    answer = client.ask("/v1/training/update", body, _UPDATE_TIMEOUT_S)
    with client.reading():
        text = _update_text(answer)
    return show(args, answer, lambda: text)


def _named(args: Namespace) -> dict[str, object]:
    return {"lora_adapter": args.adapter} if args.adapter else {}


def _show_status(args: Namespace, client: Client, answer: Mapping[str, Any]) -> int:
    with client.reading():
        text = _status_text(client.base, answer)
    return show(args, answer, lambda: text)


def _status_text(base: str, answer: Mapping[str, Any]) -> str:
    if not answer["training_enabled"]:
        return f"{base} does not train; start it with --enable-rl-training"
    waiting = f"{answer['trajectories_waiting']} wait for a reward, {answer['groups_ready']} groups for an update"
    reason = f": {answer['pause_reason']}" if answer["pause_reason"] else ""
    lines = {
        "training": f"{answer['lora_adapter']}, {answer['state']}{reason}",
        "live": answer["live_lora"] or "none yet",
        "best": answer["best_lora"] or "none yet",
        "updates": f"{answer['updates_total']} since the start, {answer['step']} steps in all",
        "last": answer["last_update"] or "none yet",
        "reward": f"{_number(answer['reward_mean'])}, running mean {_number(answer['reward_running_mean'])}",
        "collected": f"{answer['trajectories_collected']} answers; {waiting}",
        "dropped": _counts(answer["drops"]),
        "skipped": _counts(answer["skips"]),
        "divergences": ", ".join(each["signal"] for each in answer["divergences"]) or "none",
        "advice": answer["advice"],
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)


def _update_text(answer: Mapping[str, Any]) -> str:
    reason = f" ({answer['reason']})" if answer["reason"] else ""
    saved = f", saved as {answer['checkpoint']}" if answer["checkpoint"] else ""
    return f"{answer['status']}{reason}: {answer['lora_adapter'] or 'no version'} at step {answer['step']}{saved}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
