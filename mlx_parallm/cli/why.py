"""`mlx_parallm why`: what a version of a running server consists of, and which of it pushed an answer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from mlx_parallm.cli.client import SERVER, Client
from mlx_parallm.cli.parser import argument, at_least, takes
from mlx_parallm.cli.show import JSON, table
from mlx_parallm.errors import ConfigError

_PATH = "/v1/training/why"
_ANSWER = "traj-"
"""What the ids of collected answers begin with."""
_READING_S, _PASSES_S = 600.0, 3600.0
"""A large journal takes long to read; an answer takes a backward pass for each sample, between requests."""
_OF_VERSION = (
    *("update", "made", "version", "learnt from", "answers", "mean reward", "forgotten"),
    *("step", "keys", "new settings"),
)
_OF_UPDATE = ("share", "reward", "advantage", "key", "answer", "what was said")
_OF_ANSWER = ("push", "likeness", "update", "reward", "share", "key", "answer", "what was said")
_SAID = 60
"""Characters of a question and its answer that are shown."""
_UPDATES_SHOWN, _KEYS_SHOWN = 20, 3
_HIDDEN = "of another key"


@takes(
    argument(
        "what",
        nargs="?",
        metavar="VERSION_OR_ANSWER",
        help="A version, such as tone@3, or the name of an adapter: its live version. Or the id of a collected answer, "
        "traj-…. Default: the live version of the default adapter.",
    ),
    argument("--update", type=at_least(1), metavar="NUMBER", help="Of a version: show the answers of this update."),
    argument("--samples", type=at_least(1), metavar="COUNT", help="Of an answer: most samples that are looked at."),
    *SERVER,
    JSON,
)
def why(args: Namespace) -> int:
    """Prints what a version consists of, or what pushed an answer most.

    Raises:
        ConfigError: a flag is for the other of the two.
    """
    is_answer = (args.what or "").startswith(_ANSWER) and "@" not in args.what
    if args.update is not None and is_answer:
        raise ConfigError("--update: this is for a version, and not for an answer")
    if args.samples is not None and not is_answer:
        raise ConfigError("--samples: this is for an answer, and not for a version")
    client = Client(args)
    if is_answer:
        body = {"trajectory_id": args.what} | ({"samples": args.samples} if args.samples else {})
        return client.show(args, _answer_text, _PATH, body, _PASSES_S)
    query = {"version": args.what, "update": args.update}
    sent = urlencode({name: value for name, value in query.items() if value is not None})
    text = _version_text if args.update is None else _update_text
    return client.show(args, text, f"{_PATH}?{sent}" if sent else _PATH, timeout_s=_READING_S)


# -- a version -------------------------------------------------------------------------------------


def _version_text(found: Mapping[str, Any]) -> str:
    updates = found["updates"]
    facts = [("updates", found["updates_total"]), ("answers learnt from", found["trajectories"])]
    facts += [("starting from", _start(found)), ("base model", found["base_model"])]
    facts += [("whose answers", _keys(found["keys"]))] if found["keys"] else []
    facts += [("saved as", ", ".join(found["checkpoints"]))] if found["checkpoints"] else []
    if not updates:
        return f"{found['version']}\n{table(facts)}"
    rows = [_update_row(update) for update in updates[:_UPDATES_SHOWN]]
    left_out = found["updates_total"] - len(rows)
    notes = [f"{left_out} older updates are left out; --json has more"] if left_out > 0 else []
    notes += ["`mlx_parallm why VERSION --update NUMBER` shows what one update learnt from."]
    return "\n".join([found["version"], table(facts), "", table([_OF_VERSION, *rows]), "", *notes])


def _start(found: Mapping[str, Any]) -> str:
    if found["missing"]:
        first, last = found["missing"]
        return f"not known: its changes {first} to {last} are not in the journal any more"
    return f"{found['start']}, which was not trained here" if found["start"] else "the base model, as it is"


def _update_row(update: Mapping[str, Any]) -> tuple[object, ...]:
    settings = ", ".join(f"{name} {value}" for name, value in update["changed_settings"].items())
    return (
        update["number"],
        update["at"].replace("T", " ")[:16],
        update["version"],
        update["signal"].replace("_", " "),
        update["trajectories"],
        _number(update["reward_mean"]),
        update["forgotten"] or None,
        f"{update['learning_rate']:.2g}",
        _keys(update["keys"]) or update["problem"] or None,
        settings or None,
    )


def _keys(keys: Sequence[Mapping[str, Any]]) -> str:
    """The keys with the largest shares."""
    named = [f"{_key(part['key'])} {part['share']:.0%}" for part in keys[:_KEYS_SHOWN]]
    more = len(keys) - len(named)
    return ", ".join([*named, *([f"{more} more"] if more > 0 else [])])


def _key(name: str | None) -> str:
    return "unnamed" if name is None else name or "the server's own tasks"


# -- an update -------------------------------------------------------------------------------------


def _update_text(found: Mapping[str, Any]) -> str:
    (update,) = found["updates"]
    heading = f"update {update['number']} of {found['version']}, {update['at'].replace('T', ' ')[:16]}"
    if update["problem"]:
        return f"{heading}\n{update['problem']}"
    rows = [
        (f"{each['share']:.1%}", _number(each["reward"]), _number(each["advantage"]) or each["reason"], *_about(each))
        for each in update["samples"]
    ]
    note = "share: its part of the update. advantage: how much better than expected; above 0, it was made likelier."
    return "\n".join([heading, "", table([_OF_UPDATE, *rows]), "", note])


def _about(sample: Mapping[str, Any]) -> tuple[str | None, ...]:
    if not sample["readable"]:
        return (None, None, _HIDDEN)
    said = f"{sample['prompt'][-_SAID // 2 :]} → {sample['answer']}"
    return (_key(sample["key"]), sample["trajectory_id"], said if len(said) <= _SAID else f"{said[:_SAID]}…")


# -- an answer -------------------------------------------------------------------------------------


def _answer_text(found: Mapping[str, Any]) -> str:
    looked_at = f"{found['samples_looked_at']} of {found['samples_total']} answers"
    lines = [
        f"This answer is of {found['version']}, and {looked_at} that it learnt from were looked at.",
        *([_unreadable(found["samples_unreadable"])] if found["samples_unreadable"] else []),
        *(f"Not known: {problem}." for problem in found["problems"]),
        "",
        *_ranked("pushed towards it most", found["towards"]),
        *_ranked("pushed away from it most", found["away"]),
        "push: by how much it is estimated to have changed the answer's log-probability, in nats. likeness: how well",
        "the direction in which it was learnt fits this answer, -1 to 1, which ranks them.",
        f"All this is an estimate at the weights of {found['weights']}. What the answer would be without a sample,",
        "only a rebuild without it shows: `mlx_parallm forget --trajectory ID`.",
    ]
    return "\n".join(lines)


def _unreadable(count: int) -> str:
    return f"{count} of them {'is' if count == 1 else 'are'} of other keys, and left out."


def _ranked(what: str, samples: Sequence[Mapping[str, Any]]) -> list[str]:
    if not samples:
        return [f"Nothing {what.removesuffix(' most')}.", ""]
    rows = [
        (
            f"{each['score']:+.3g}",
            f"{each['cosine']:+.2f}",
            each["update"],
            _number(each["reward"]),
            f"{each['share']:.1%}",
            *_about(each),
        )
        for each in samples
    ]
    return [f"What {what}:", table([_OF_ANSWER, *rows]), ""]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"
