"""What `mlx_parallm doctor | list | ps | version` print."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from http.client import HTTPException
from importlib import metadata
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from mlx_parallm import __version__
from mlx_parallm.config import API_KEY_VARIABLE, human_bytes
from mlx_parallm.errors import ConfigError, ModelNotFoundError, ParaLLMError

TIMEOUT_S = 5.0


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


def ps(url: str, api_key: str | None) -> int:
    """Prints the models, sequences and memory of the server at `url`.

    Raises:
        ConfigError: `url` is no http address, or the server wants another key.
        ParaLLMError: nothing answers there, or something else than this server.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url: must start with http:// or https://, got {url!r}")
    models, state = (_get(base, path, api_key) for path in ("/v1/models", "/debug/state"))
    try:
        print(_summary(base, models, state["engine"]))
    except (KeyError, TypeError) as error:
        raise ParaLLMError(f"{base} answers, but not as MLX ParaLLM {__version__} does") from error
    return 0


def _summary(base: str, models: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    names = ", ".join(model["id"] for model in models["data"])
    memory = f"{human_bytes(engine['kv_bytes_held'])} of {human_bytes(engine['kv_bytes_budget'])}"
    lines = (base, f"models    {names}", f"running   {engine['running']}", f"waiting   {engine['waiting']}")
    return "\n  ".join((*lines, f"KV cache  {memory}"))


def _get(base: str, path: str, api_key: str | None) -> Any:
    request = Request(base + path, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            return json.load(response)
    except HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(f"{base} wants its API key: pass --api-key or set {API_KEY_VARIABLE}") from error
        raise ParaLLMError(f"{base}{path} answered with status {error.code}") from error
    except (OSError, HTTPException) as error:
        raise ParaLLMError(f"no server answers at {base}: start one with `mlx_parallm serve`, or pass --url") from error
    except ValueError as error:
        raise ParaLLMError(f"{base} answers, but not as MLX ParaLLM does") from error
