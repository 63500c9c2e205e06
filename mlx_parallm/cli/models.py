"""The commands about models on this machine: list, pull, check, and tokenizer save."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.flags import MODEL
from mlx_parallm.cli.parser import argument, subcommands, takes
from mlx_parallm.cli.show import JSON, show, table
from mlx_parallm.config import human_bytes
from mlx_parallm.errors import ModelNotFoundError

if TYPE_CHECKING:
    from mlx_parallm.engine.model_check import ModelVerdict

_TRUST = argument("--trust-remote-code", action="store_true", help="Run Python code that comes with the model.")


@takes(JSON)
def list_models(args: Namespace) -> int:
    """Prints the bundled model and those in the Hugging Face cache, with their sizes on disk."""
    models = [*_bundled_model(), *_cached_models()]
    data = [{"model": name, "bytes": size, "where": where} for name, size, where in models]
    rows = [(name, human_bytes(size), where) for name, size, where in models]
    none = "no models on this machine; `mlx_parallm pull` downloads one"
    return show(args, data, table([("model", "size", "where"), *rows]) if rows else none)


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


@takes(argument("model", metavar="HUB_ID", help="The model, such as mlx-community/Qwen3-4B-4bit."), JSON)
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
    return show(args, data, f"{args.model}: {human_bytes(size)} in {folder}; {serve}")


@takes(
    argument("model", metavar="DIR_OR_HUB_ID", nargs="?", help="The model. Default: the bundled one."),
    _TRUST,
    argument("--row-by-row", action="store_true", help="Run each row alone, which is slow and always right."),
    JSON,
)
def check(args: Namespace) -> int:
    """Prints what a model can do here. The exit status is 0 if all checks passed, else 1."""
    from mlx_parallm.engine.model_check import check_model

    verdict = check_model(args.model, args.trust_remote_code, args.row_by_row)
    show(args, asdict(verdict), _verdict(verdict))
    return int(any(each.problem for each in verdict.findings))


def _verdict(verdict: ModelVerdict) -> str:
    rows = [
        (each.check, None if each.error is None else f"{each.error:.1e}", each.problem or "passed")
        for each in verdict.findings
    ]
    return "\n".join(
        (
            f"family   {verdict.family}; layers checked: {verdict.layers}",
            f"runs     {'row by row (compatible)' if verdict.compatible else 'batched'}",
            f"in parts {', '.join(verdict.in_parts) or 'nothing'}",
            table([("check", "largest error", "result"), *rows]),
        )
    )


@takes(
    argument("output", type=Path, metavar="DIR", help="The folder to write. It must not exist."),
    MODEL,
    _TRUST,
)
def _save_tokenizer(args: Namespace) -> int:
    """Writes the tokenizer of a model into a folder of its own."""
    from mlx_parallm.model.loading import save_tokenizer

    save_tokenizer(args.model_path, args.output, trust_remote_code=args.trust_remote_code)
    print(f"wrote {args.output}; read it with transformers.AutoTokenizer.from_pretrained({str(args.output)!r})")
    return 0


TOKENIZER = subcommands(("save", "Write a folder that Transformers reads without a network.", _save_tokenizer))
