"""What `mlx_parallm doctor | list | ps | version` print."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from mlx_parallm import __version__
from mlx_parallm.cli.client import Client
from mlx_parallm.cli.text import listed
from mlx_parallm.config import human_bytes
from mlx_parallm.errors import ModelNotFoundError


def doctor() -> int:
    """Prints what this machine offers; a warning is part of the report, not a failure."""
    from mlx_parallm.model import doctor as checks

    print(checks.report().render())
    return 0


def version() -> int:
    print(f"mlx_parallm {__version__}")
    for package in ("mlx", "mlx-lm"):
        print(f"{package} {metadata.version(package)}")
    print(f"python {platform.python_version()} on {platform.platform(terse=True)}")
    return 0


def list_models() -> int:
    """Prints the bundled model and those in the hub cache, with their sizes on disk."""
    rows = [*_bundled_model(), *_cached_models()]
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, size, note in rows:
        print(f"{name:<{width}}  {human_bytes(size):>10}  {note}")
    if not rows:
        print("no models on this machine; --model-path with a hub id downloads one")
    return 0


def _bundled_model() -> list[tuple[str, int, str]]:
    from mlx_parallm.model.bundled import bundled_path

    try:
        size = bundled_path().stat().st_size
    except ModelNotFoundError:  # installed without its package: the rest of the list still stands
        return []
    return [("SmolLM2-135M-Instruct", size, "bundled: served when no --model-path is given")]


def _cached_models() -> list[tuple[str, int, str]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:  # nothing was ever downloaded
        return []
    models = sorted((repo for repo in repositories if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return [(repo.repo_id, repo.size_on_disk, str(repo.repo_path)) for repo in models]


def ps(client: Client) -> int:
    """Prints the models, adapters, sequences and memory of a running server. Raises what Client raises."""
    models, adapters, state = (client.get(path) for path in ("/v1/models", "/v1/adapters", "/debug/state"))
    with client.reading():
        text = _summary(client.base, models, adapters, state["engine"])
    print(text)
    return 0


def _summary(base: str, models: Mapping[str, Any], adapters: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    names = ", ".join(model["id"] for model in models["data"])
    live = listed([card["id"] for card in adapters["data"] if card["live"]])
    slots = f"{adapters['slots']['used']} of {adapters['slots']['total']} slots used"
    lines = (
        base,
        f"models    {names}",
        f"adapters  {live} ({slots})",
        f"running   {engine['running']}",
        f"waiting   {engine['waiting']}",
        f"KV cache  {human_bytes(engine['kv_bytes_held'])} of {human_bytes(engine['kv_bytes_budget'])}",
    )
    return "\n  ".join(lines)
