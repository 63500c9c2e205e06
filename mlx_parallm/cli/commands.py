"""The commands of `mlx_parallm`, apart from `serve` and `train`.

Each takes the parsed arguments and returns its exit status. Those that talk to a running server raise the errors that
`Client` lists.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from mlx_parallm import __version__
from mlx_parallm.app.banner import listed
from mlx_parallm.cli.table import table
from mlx_parallm.config import API_KEY_VARIABLE, human_bytes
from mlx_parallm.errors import ConfigError, ModelNotFoundError, ParaLLMError

_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 600.0
"""Loading an adapter reads files and waits for its turn between requests."""
_MAX_ERROR_BYTES = 65536
_ADAPTER_COLUMNS = ("id", "live", "residence", "rank", "targets", "bytes", "root")


# -- this machine --------------------------------------------------------------------------------


def version(args: Namespace) -> int:
    """Prints the versions of this package, MLX, mlx-lm and Python."""
    print(f"mlx_parallm {__version__}")
    for package in ("mlx", "mlx-lm"):
        print(f"{package} {metadata.version(package)}")
    print(f"python {platform.python_version()} on {platform.platform(terse=True)}")
    return 0


def doctor(args: Namespace) -> int:
    """Prints a report about this machine. Warnings are part of the report and do not change the exit status."""
    from mlx_parallm.batch.attention_times import typical_attention
    from mlx_parallm.model.device import report

    print(report({"attention": typical_attention().text}))
    return 0


def list_models(args: Namespace) -> int:
    """Prints the bundled model and those in the Hugging Face cache, with their sizes on disk."""
    rows = [*_bundled_model(), *_cached_models()]
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, size, note in rows:
        print(f"{name:<{width}}  {human_bytes(size):>10}  {note}")
    if not rows:
        print("no models on this machine; --model-path with a hub id downloads one")
    return 0


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


# -- a running server ----------------------------------------------------------------------------


def ps(args: Namespace) -> int:
    """Prints the models, adapters, sequences and memory of a running server."""
    client = Client(args)
    models, adapters, state = (client.ask(path) for path in ("/v1/models", "/v1/adapters", "/debug/state"))
    with client.reading():
        text = _server_summary(client.base, models, adapters, state["engine"])
    print(text)
    return 0


def _server_summary(
    base: str, models: Mapping[str, Any], adapters: Mapping[str, Any], engine: Mapping[str, Any]
) -> str:
    names = ", ".join(model["id"] for model in models["data"])
    live = listed([card["id"] for card in adapters["data"] if card["live"]])
    slots = f"{adapters['slots']['used']} of {adapters['slots']['total']} slots used"
    held, budget, cached = (human_bytes(engine[f"kv_bytes_{kind}"]) for kind in ("held", "budget", "cached"))
    lines = (
        base,
        f"models    {names}",
        f"adapters  {live} ({slots})",
        f"running   {engine['running']}",
        f"waiting   {engine['waiting']}",
        f"KV cache  {held} of {budget}, cached prefixes {cached}",
    )
    return "\n  ".join(lines)


def list_adapters(args: Namespace) -> int:
    """Prints the adapters of a running server, its route and its slots."""
    client = Client(args)
    answer = client.ask("/v1/adapters")
    with client.reading():
        text = _adapters_text(answer)
    print(text)
    return 0


def load_adapter(args: Namespace) -> int:
    """Loads an adapter into a running server. A path that exists on this machine is sent as an absolute path."""
    local = Path(args.path).expanduser()
    path = str(local.resolve()) if local.exists() else args.path
    client = Client(args)
    body = {"lora_name": args.name, "lora_path": path, "load_inplace": args.replace}
    answer = client.ask("/v1/load_lora_adapter", body, _LOAD_TIMEOUT_S)
    with client.reading():
        text = f"{answer['lora_name']}@{answer['version']} is live"
    print(text)
    return 0


def unload_adapter(args: Namespace) -> int:
    """Removes every version of a name, or one version, from a running server."""
    client = Client(args)
    answer = client.ask("/v1/unload_lora_adapter", {"lora_name": args.name})
    with client.reading():
        text = f"unloaded {', '.join(answer['unloaded'])}"
    print(text)
    return 0


def _adapters_text(answer: Mapping[str, Any]) -> str:
    slots, bank = answer["slots"], human_bytes(answer["bank_bytes"])
    route = ", ".join(f"{selector} {100 * share:.3g} %" for selector, share in answer["route"].items())
    adapters = table([_ADAPTER_COLUMNS, *map(_adapter_row, answer["data"])]) if answer["data"] else "no adapters"
    used = f"{slots['used']} of {slots['total']} used, {slots['pinned']} pinned, bank {bank}"
    return f"{adapters}\n\nroute  {route}\nslots  {used}"


def _adapter_row(card: Mapping[str, Any]) -> tuple[str, ...]:
    live, targets, size = "yes" if card["live"] else "no", ",".join(card["targets"]), human_bytes(card["bytes"])
    return (card["id"], live, card["residence"], str(card["rank"]), targets, size, card["root"] or "-")


# -- the tokenizer -------------------------------------------------------------------------------


def save_tokenizer(args: Namespace) -> int:
    """Writes the tokenizer of a model into a folder of its own."""
    from mlx_parallm.model.tokenizer_folder import save_tokenizer as save

    save(args.model_path, args.output, trust_remote_code=args.trust_remote_code)
    print(f"wrote {args.output}; read it with transformers.AutoTokenizer.from_pretrained({str(args.output)!r})")
    return 0


# -- adapter files -------------------------------------------------------------------------------


def merge_adapter(args: Namespace) -> int:
    """Writes a model directory with the adapter merged into the weights."""
    from mlx_parallm.model.merge import merge

    merge(args.model_path, args.adapter, args.output, dequantize=args.dequantize)
    print(f"wrote {args.output}; serve it with `mlx_parallm serve --model-path {shlex.quote(str(args.output))}`")
    return 0


def convert_adapter(args: Namespace) -> int:
    """Writes an adapter in another program's format."""
    from mlx_parallm.model.merge import convert

    convert(args.model_path, args.adapter, args.output, args.format)
    print(f"wrote {args.output} in the format of {args.format}")
    return 0


# -- the HTTP client of the commands above -------------------------------------------------------


class Client:
    """A running server, at `args.url` with or without /v1.

    Raises:
        ConfigError: the URL is not an http address, or the server refuses the API key or the Host header.
        ParaLLMError: nothing answers there, another kind of server answers, or the server refuses the request; in the
            last case the message is the server's own.
    """

    def __init__(self, args: Namespace) -> None:
        self.base = args.url.rstrip("/").removesuffix("/v1")
        if not self.base.startswith(("http://", "https://")):
            raise ConfigError(f"--url: must start with http:// or https://, got {args.url!r}")
        api_key = args.api_key or os.environ.get(API_KEY_VARIABLE)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(self, path: str, body: Mapping[str, object] | None = None, timeout_s: float = _TIMEOUT_S) -> Any:
        """The decoded JSON answer to a GET without a body, or to a POST with one."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.base + path, data, self._headers), timeout=timeout_s) as response, self.reading():
                return json.load(response)
        except HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except TimeoutError as error:
            raise ParaLLMError(f"{self.base} did not answer within {timeout_s:g} s") from error
        except (OSError, HTTPException) as error:
            start = "start one with `mlx_parallm serve`, or pass --url"
            raise ParaLLMError(f"no server answers at {self.base}: {start}") from error
        except ValueError as error:  # the error's text may contain the key
            raise ConfigError("--url or --api-key: it cannot be part of an HTTP request") from error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps code that reads an answer: a missing field, or one of another type, means that it is another server."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ParaLLMError(f"{self.base} answers, but not as MLX ParaLLM {__version__} does") from error

    def _refusal(self, error: HTTPError) -> ParaLLMError:
        if error.code == 401:
            return ConfigError(f"{self.base} requires its API key: pass --api-key or set {API_KEY_VARIABLE}")
        message = _message(error) or f"{error.url} answered with status {error.code}"
        return ConfigError(message) if error.code == 403 else ParaLLMError(message)


def _message(error: HTTPError) -> str | None:
    """The message in an error body of OpenAI's form; None if the body has another form."""
    try:
        message = json.loads(error.read(_MAX_ERROR_BYTES))["error"]["message"]
    except (OSError, HTTPException, LookupError, TypeError, ValueError):
        return None
    return message if isinstance(message, str) and message.strip() else None
