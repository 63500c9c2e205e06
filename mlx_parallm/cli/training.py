"""`mlx_parallm training`: watches and controls the training of a running server."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

from mlx_parallm.cli.client import SERVER, TIMEOUT_S, Client
from mlx_parallm.cli.parser import Command, argument, subcommands, takes
from mlx_parallm.cli.show import JSON

_UPDATE_TIMEOUT_S = 3600.0
"""An update, and a rollback, wait for the update that is being made, and for their turns between requests."""
_TRAINED = (
    argument("--adapter", metavar="NAME", help="A trained adapter. Default: the default adapter."),
    *SERVER,
    JSON,
)


@takes(*_TRAINED)
def status(args: Namespace) -> int:
    """Prints how far the training of an adapter is."""
    query = f"?lora_adapter={args.adapter}" if args.adapter else ""
    return _show_status(args, f"status{query}", None)


def _control(name: str) -> Command:
    """A command that changes the training and prints how far it is then."""
    return takes(*_TRAINED)(lambda args: _show_status(args, name, _named(args)))


@takes(
    argument("--checkpoint", metavar="TAG", help="Save the adapter with this tag after the update."),
    *_TRAINED,
)
def update(args: Namespace) -> int:
    """Makes one update and prints what became of it."""
    body = _named(args) | ({"checkpoint_name": args.checkpoint} if args.checkpoint else {})
    return Client(args).show(args, _update_text, "/v1/training/update", body, _UPDATE_TIMEOUT_S)


@takes(
    argument("--to", metavar="CHECKPOINT", help="A checkpoint's name or tag. Default: the best version."),
    *_TRAINED,
)
def roll_back(args: Namespace) -> int:
    """Goes back to a checkpoint, or to the best version."""
    return _show_status(args, "rollback", _named(args) | ({"to": args.to} if args.to else {}))


COMMANDS = subcommands(
    ("status", "Show the training of an adapter.", status),
    ("start", "Train this adapter too, from its live version.", _control("start")),
    (
        "stop",
        "End the training of an adapter, and its lesson. What it has learnt stays, and stays live.",
        _control("stop"),
    ),
    ("pause", "Stop automatic updates. Trajectories are still collected.", _control("pause")),
    ("resume", "Restart automatic updates.", _control("resume")),
    ("update", "Make an update now, on all complete groups, even if training is paused.", update),
    ("rollback", "Make an earlier version live, and continue training from it.", roll_back),
)


def _named(args: Namespace) -> dict[str, object]:
    return {"lora_adapter": args.adapter} if args.adapter else {}


def _show_status(args: Namespace, path: str, body: Mapping[str, object] | None) -> int:
    client = Client(args)
    text = partial(_status_text, client.base)
    return client.show(args, text, f"/v1/training/{path}", body, _UPDATE_TIMEOUT_S if body is not None else TIMEOUT_S)


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
        "keys": _keys(answer["metrics"]),
        "advice": answer["advice"],
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)


def _update_text(answer: Mapping[str, Any]) -> str:
    reason = f" ({answer['reason']})" if answer["reason"] else ""
    saved = f", saved as {answer['checkpoint']}" if answer["checkpoint"] else ""
    return f"{answer['status']}{reason}: {answer['lora_adapter'] or 'no version'} at step {answer['step']}{saved}"


def _keys(metrics: Mapping[str, float]) -> str:
    """Whose data the last update has learnt from; empty if that of no key."""
    if "keys" not in metrics:
        return ""
    return f"{metrics['keys']:.0f} in the last update, {metrics['largest_key_share']:.0%} of it from one"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
