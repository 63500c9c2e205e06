"""`mlx_parallm adapters`: the adapters of a running server, and those in folders, which need no server."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm.cli.client import SERVER, Client
from mlx_parallm.cli.export import FORMATS, export
from mlx_parallm.cli.flags import MODEL, flags_of_keys, settings
from mlx_parallm.cli.parser import argument, group, subcommands, takes
from mlx_parallm.cli.show import JSON, table
from mlx_parallm.config import KEYS, Mode, Setting, human_bytes, resolve
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from mlx_parallm.adapters.average import Average
    from mlx_parallm.cli.adapter_evaluation import ComparisonSettings
    from mlx_parallm.rl.status import EvaluationResult

_SLOW_S = 600.0
"""Loading, saving and routing read or write files, and wait for their turn between requests."""
_COLUMNS = ("id", "live", "residence", "rank", "bytes", "requests", "root")


def _share(text: str) -> tuple[str, float]:
    name, given, weight = text.rpartition("=")
    try:
        return (name, float(weight)) if given else (text, 1.0)
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: after '=' comes a number, such as {name}=0.1") from None


@takes(*SERVER, JSON)
def _list(args: Namespace) -> int:
    """Prints the adapters of a running server, its route and its slots."""
    return Client(args).show(args, _list_text, "/v1/adapters")


@takes(
    argument("name", metavar="NAME", help="The name by which requests select it."),
    argument(
        "path",
        metavar="PATH",
        help="Its folder on this machine, a path under the server's adapter folders, or an id on the hub that the "
        "server allows. A run, an adapter in it, and there `latest` or a tag, mean a checkpoint.",
    ),
    argument("--base", metavar="MODEL", help="The base model that it is for, on a server with several."),
    argument("--replace", action="store_true", help="Replace the adapter that has NAME."),
    *SERVER,
    JSON,
)
def _load(args: Namespace) -> int:
    """Loads an adapter into a running server. A path that exists on this machine is sent as an absolute path."""
    from mlx_parallm.adapters.runs import adapter_in

    local = adapter_in(Path(args.path).expanduser())
    path = str(local.resolve()) if local.exists() else args.path
    body = {"lora_name": args.name, "lora_path": path, "load_inplace": args.replace, **_of_base(args)}
    return Client(args).show(args, _load_text, "/v1/load_lora_adapter", body, _SLOW_S)


@takes(
    argument("name", metavar="NAME", help="A name, or one version of it: NAME@VERSION."),
    argument("--base", metavar="MODEL", help="The base model that it must be one of."),
    *SERVER,
    JSON,
)
def _unload(args: Namespace) -> int:
    """Removes every version of a name, or one version, from a running server."""
    comes_back = "What is in --adapter-dir or has checkpoints is loaded again when the server starts."
    return Client(args).show(
        args,
        lambda answer: f"unloaded {', '.join(answer['unloaded'])}\n{comes_back}",
        "/v1/unload_lora_adapter",
        {"lora_name": args.name, **_of_base(args)},
    )


@takes(argument("name", nargs="?", metavar="NAME", help="The adapter. Default: the route."), *SERVER, JSON)
def _roll_back(args: Namespace) -> int:
    """Makes the previous version of an adapter live, or undoes the last change of the route."""
    text, body = _route_text, {}
    if args.name:
        text, body = (lambda answer: f"{answer['lora_adapter']} is live"), {"lora_name": args.name}
    return Client(args).show(args, text, "/v1/adapters/rollback", body, _SLOW_S)


@takes(
    argument(
        "shares",
        nargs="*",
        type=_share,
        metavar="NAME=WEIGHT",
        help="An adapter, a version or `base`, and its share; NAME alone has all. Default: show the route.",
    ),
    *SERVER,
    JSON,
)
def _route(args: Namespace) -> int:
    """Shows the route, or sets it."""
    body = {"weights": dict(args.shares)} if args.shares else None
    return Client(args).show(args, _route_text, "/v1/adapters/route", body, _SLOW_S)


@takes(
    argument("name", nargs="?", metavar="NAME", help="A name or version. Default: the default adapter."),
    argument("--tag", metavar="TAG", help="A name for the checkpoint."),
    argument("--step", type=int, metavar="NUMBER", help="Its number. Default: the next one."),
    *SERVER,
    JSON,
)
def _save(args: Namespace) -> int:
    """Saves a version of an adapter as a checkpoint."""
    body = {"lora_name": args.name, "checkpoint_name": args.tag, "step": args.step}
    return Client(args).show(
        args,
        lambda answer: f"saved {answer['lora_adapter']} as {', '.join([answer['name'], *answer['tags']])}",
        "/v1/training/checkpoint",
        {field: value for field, value in body.items() if value is not None},
        _SLOW_S,
    )


@takes(
    argument("name", metavar="NAME", help="The adapter."),
    argument("--yes", action="store_true", help="Remove it."),
    argument("--stop-training", action="store_true", help="Stop its lesson and its training first."),
    *SERVER,
    JSON,
)
def _delete(args: Namespace) -> int:
    """Lists what a server has kept of an adapter and, with --yes, removes it."""
    client, path = Client(args), "/v1/adapters/delete"
    body = {"lora_name": args.name, "dry_run": not args.yes, "stop_training": args.stop_training}
    if not args.yes or args.json:
        return client.show(args, partial(_kept, args.name), path, body, _SLOW_S)
    client.show(args, _parts, path, {**body, "dry_run": True}, _SLOW_S)
    client.ask(path, body, _SLOW_S)
    print(f"\nremoved {args.name} and all of this")
    return 0


def _of_base(args: Namespace) -> dict[str, str]:
    return {} if args.base is None else {"base_model_name": args.base}


def _list_text(answer: Mapping[str, Any]) -> str:
    slots, bank = answer["slots"], human_bytes(answer["bank_bytes"])
    adapters = table([_COLUMNS, *map(_row, answer["data"])]) if answer["data"] else "no adapters"
    used = f"{slots['used']} of {slots['total']} used, {slots['pinned']} pinned, bank {bank}"
    return f"{adapters}\n\n{_route_text(answer)}\nslots  {used}"


def _row(card: Mapping[str, Any]) -> tuple[object, ...]:
    live, size = "yes" if card["live"] else "no", human_bytes(card["bytes"])
    return card["id"], live, card["residence"], card["rank"], size, card["requests"], card["root"] or None


def _load_text(answer: Mapping[str, Any]) -> str:
    warning = f"\nwarning: {answer['warning']}" if answer["warning"] else ""
    return f"{answer['lora_name']}@{answer['version']} is live{warning}"


def _route_text(answer: Mapping[str, Any]) -> str:
    return "route  " + ", ".join(f"{selector} {100 * share:.3g} %" for selector, share in answer["route"].items())


def _parts(answer: Mapping[str, Any]) -> str:
    rows = (
        (part["what"], part["count"], human_bytes(part["bytes"]) if part["bytes"] else None, part["path"] or "memory")
        for part in answer["parts"]
    )
    return table([("what", "count", "size", "where"), *rows])


def _kept(name: str, answer: Mapping[str, Any]) -> str:
    stop = " --stop-training" if answer["in_training"] else ""
    how = f"`mlx_parallm adapters delete {name} --yes{stop}` removes all of this"
    return f"{_parts(answer)}\n\nnothing was removed; {how}"


# -- folders ---------------------------------------------------------------------------------------

_TASKS = "rl_training.evaluation.tasks"
_EVALUATION = (
    *("rl_training.reward", "rl_training.judge.url", "rl_training.judge.model", "rl_training.max_completion_tokens"),
    *("rl_training.system_prompt", _TASKS, "rl_training.evaluation.size"),
)
_FIXED = {
    "server.mode": Setting(Mode.INFERENCE_ONLY.value, "adapters average"),
    "rl_training.enabled": Setting(False, "adapters average"),
    "rl_training.evaluation.every": Setting(1, "adapters average"),
}


@takes(
    argument("adapters", type=Path, nargs="+", metavar="ADAPTER_DIR", help="The adapters' folders, two or more."),
    argument(
        "--out", type=Path, required=True, metavar="DIR", help="Required. The folder to write. It must not exist."
    ),
    argument(
        "--weights",
        type=float,
        nargs="+",
        metavar="NUMBER",
        help="One number above 0 for each adapter, such as its number of examples. Default: all weigh the same.",
    ),
    argument(
        "--rank",
        type=int,
        metavar="RANK",
        help="Largest rank of the average. Default: the sum of the adapters' ranks, at which the average is exact.",
    ),
    argument("--to", choices=("mlx", "peft"), default="peft", help="Its format: mlx-lm's or PEFT's. Default: peft."),
    MODEL,
    group(
        "evaluation",
        flags_of_keys(*_EVALUATION),
        description="With --eval-tasks, the adapters and the average are evaluated.",
    ),
)
def _average(args: Namespace) -> int:
    """Writes the weighted mean of adapters, and prints what the rank costs and what the evaluation found.

    Raises:
        ConfigError: an argument or a setting cannot be used.
        ParaLLMError: see `model.merge.write_average` and `cli.adapter_evaluation.ComparisonSettings`.
    """
    from mlx_parallm.model.merge import write_average

    comparison = _comparison(args)
    evaluations: list[EvaluationResult] = []

    def evaluate(folder: Path, rank: int) -> None:
        if comparison is not None:
            evaluations.extend(comparison.evaluate([*args.adapters, folder], rank))

    mean = write_average(args.model_path, args.adapters, args.out, FORMATS[args.to], args.weights, args.rank, evaluate)
    print(_average_text(args.out, len(args.adapters), mean))
    if evaluations:
        print(_rewards(args.adapters, evaluations))
    return 0


def _comparison(args: Namespace) -> ComparisonSettings | None:
    """None without --eval-tasks. The environment variables of the evaluation's settings count; those of a server, such
    as its folders, do not."""
    given = settings(args)
    if _TASKS not in given:
        if useless := [given[path].source for path in _EVALUATION if path in given]:
            raise ConfigError(f"{useless[0]}: there is no evaluation; add --eval-tasks, or leave it out")
        return None
    from mlx_parallm.cli.adapter_evaluation import ComparisonSettings

    model = {"model.base_model_path": Setting(args.model_path, "--model-path")}
    names = {KEYS[path].env_name for path in (*_EVALUATION, "rl_training.judge.api_key") if path != _TASKS}
    environment = {name: value for name, value in os.environ.items() if name in names}
    return ComparisonSettings(resolve(given | _FIXED | model, environment).config)


def _average_text(output: Path, count: int, mean: Average) -> str:
    rank = mean.weights.rank
    wrote = f"wrote {output}: the mean of {count} adapters, rank {rank}"
    if rank == mean.full_rank:
        return f"{wrote}, which is exact"
    worst = mean.reductions[mean.worst]
    return (
        f"{wrote} of {mean.full_rank}\n"
        f"lost by the lower rank: {mean.error:.3g} of the Frobenius norm, {worst.error:.3g} in {mean.worst}, the worst"
    )


def _rewards(adapters: Sequence[Path], evaluations: Sequence[EvaluationResult]) -> str:
    rows = [
        (name, f"{one.mean:.3f}", f"{one.low:.3f} to {one.high:.3f}", one.answers, one.failed)
        for name, one in zip([*adapters, "the average"], evaluations, strict=True)
    ]
    return table([("adapter", "mean reward", "95 % interval", "answers", "failed tasks"), *rows])


COMMANDS = subcommands(
    ("list", "List the adapters of a running server, its route and its slots.", _list),
    ("load", "Load an adapter into a running server.", _load),
    ("unload", "Remove an adapter from a running server. Running requests finish with it.", _unload),
    ("rollback", "Serve the previous version of an adapter again, or undo the last change of the route.", _roll_back),
    ("route", "Show or set which adapters serve the requests that name none.", _route),
    ("save", "Save a version of an adapter as a checkpoint.", _save),
    (
        "delete",
        "Remove an adapter and all that the server has kept of it. Without --yes, only list that.",
        _delete,
    ),
    ("export", "Write an adapter for PEFT, mlx-lm or llama.cpp, or a model with it. Needs no server.", export),
    ("average", "Write the weighted mean of adapters, and evaluate it. Needs no server.", _average),
)
