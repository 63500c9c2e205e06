"""The commands about this machine: version, doctor, list, pull, and tokenizer save."""

from __future__ import annotations

import platform
from argparse import Namespace
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from mlx_parallm import __version__
from mlx_parallm.cli import self_test
from mlx_parallm.cli.parser import Parser, subcommands
from mlx_parallm.cli.table import add_json_argument, show, table
from mlx_parallm.config import human_bytes
from mlx_parallm.errors import ModelNotFoundError

_MODEL_COLUMNS = ("model", "size", "where")


def add_version(parser: Parser) -> None:
    """Adds the arguments of `version`."""
    _add(parser, version)


def add_doctor(parser: Parser) -> None:
    """Adds the arguments of `doctor`."""
    _add(parser, doctor)
    self_test.add_arguments(parser)


def add_list(parser: Parser) -> None:
    """Adds the arguments of `list`."""
    _add(parser, list_models)


def add_pull(parser: Parser) -> None:
    """Adds the arguments of `pull`."""
    parser.add_argument("model", metavar="HUB_ID", help="The model, such as mlx-community/Qwen3-4B-4bit.")
    _add(parser, pull)


def add_tokenizer(parser: Parser) -> None:
    """Adds the commands of `tokenizer`."""
    subcommands(parser)("save", "Write a folder that Transformers reads without a network.", _add_saving)


def _add_saving(parser: Parser) -> None:
    parser.add_argument("output", type=Path, metavar="DIR", help="The folder to write. It must not exist.")
    parser.add_argument("--model-path", metavar="DIR_OR_HUB_ID", help="The model. Default: the bundled one.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run Python code that comes with the model.")
    parser.set_defaults(run=save_tokenizer)


def _add(parser: Parser, run: Callable[[Namespace], int]) -> None:
    add_json_argument(parser)
    parser.set_defaults(run=run)


def version(args: Namespace) -> int:
    """Prints the versions of this package, MLX, mlx-lm and Python."""
    packages = {"mlx_parallm": __version__} | {name: metadata.version(name) for name in ("mlx", "mlx-lm")}
    system = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    lines = [f"{name} {number}" for name, number in packages.items()]
    return show(
        args, packages | system, lambda: "\n".join([*lines, f"python {system['python']} on {system['platform']}"])
    )


def doctor(args: Namespace) -> int:
    """Prints a report about this machine. Warnings are part of the report and do not change the exit status; a check of
    the self-test that fails does."""
    self_test.check_arguments(args)
    if args.self_test:
        return self_test.self_test(args)
    from mlx_parallm.cli.doctor import report

    found = report()
    return show(args, {**found.facts, "warnings": list(found.warnings)}, lambda: found.text)


# -- models --------------------------------------------------------------------------------------


def list_models(args: Namespace) -> int:
    """Prints the bundled model and those in the Hugging Face cache, with their sizes on disk."""
    models = [*_bundled_model(), *_cached_models()]
    data = [{"model": name, "bytes": size, "where": where} for name, size, where in models]
    return show(args, data, lambda: _models_text(models))


def _models_text(models: list[tuple[str, int, str]]) -> str:
    if not models:
        return "no models on this machine; `mlx_parallm pull` downloads one"
    return table([_MODEL_COLUMNS, *((name, human_bytes(size), where) for name, size, where in models)])


def _bundled_model() -> list[tuple[str, int, str]]:
    from mlx_parallm.model.bundled import BUNDLED_NAME, bundled_path

    try:
        size = bundled_path().stat().st_size
    except ModelNotFoundError:  # its package is not installed; the other models are still listed
        return []
    return [(BUNDLED_NAME, size, "bundled: served when no --model-path is given")]


def _cached_models() -> list[tuple[str, int, str]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:  # nothing was ever downloaded
        return []
    models = sorted((repo for repo in repositories if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return [(repo.repo_id, repo.size_on_disk, str(repo.repo_path)) for repo in models]


def pull(args: Namespace) -> int:
    """Downloads a model's files that are not in the cache. Loads nothing.

    Raises:
        ModelNotFoundError: there is no such model, or the hub cannot be reached.
    """
    from mlx_parallm.model.loading import find_model

    folder = find_model(args.model)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    serve = f"serve it with `mlx_parallm serve --model-path {args.model}`"
    data = {"model": args.model, "bytes": size, "where": str(folder)}
    return show(args, data, lambda: f"{args.model}: {human_bytes(size)} in {folder}; {serve}")


# -- the tokenizer -------------------------------------------------------------------------------


def save_tokenizer(args: Namespace) -> int:
    """Writes the tokenizer of a model into a folder of its own."""
    from mlx_parallm.model.loading import save_tokenizer as save

    save(args.model_path, args.output, trust_remote_code=args.trust_remote_code)
    print(f"wrote {args.output}; read it with transformers.AutoTokenizer.from_pretrained({str(args.output)!r})")
    return 0
