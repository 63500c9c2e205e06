"""The text that a server prints on stderr when it is ready: styled on a terminal, plain elsewhere. If the log is lines
of JSON, it is one of them."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from mlx_parallm import BLAS, __version__
from mlx_parallm.config import Config, GenerationConfig, ServerConfig, human_bytes, is_loopback
from mlx_parallm.core.engine import ModelCard

if TYPE_CHECKING:  # `cli` imports this module, and must not import MLX with it
    from mlx_parallm.adapters.runs import Run
    from mlx_parallm.app.build import Served

_EXAMPLE = '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
_WARNING = "WARNING: "
_MAX_NAMES = 8
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that means every interface → the address by which a client on this machine connects."""

_log = logging.getLogger(__name__)


def base_url(server: ServerConfig, port: int) -> str:
    """The address by which a client on this machine reaches the server, without a trailing slash."""
    address = _REACHABLE.get(server.host, server.host)
    return f"{server.scheme}://[{address}]:{port}" if ":" in address else f"{server.scheme}://{address}:{port}"


def render(served: Served, config: Config, port: int) -> str:
    """The banner as plain text. Each warning is one line that starts with WARNING. `port` is the one that was bound."""
    card, limits, server = served.card, served.limits, config.server
    url = base_url(server, port)
    live = listed([adapter.ref.name for adapter in served.adapters.cards() if adapter.live])
    kv_bytes = served.engine.stats().kv_bytes_budget
    wired = "none wired" if limits.wired is None else f"{human_bytes(limits.wired)} wired"
    facts = {
        "model": f"{card.name}, {card.parameters / 1e6:,.0f}M parameters",
        **({"on demand": listed(served.others)} if served.others else {}),
        "weights": f"{card.dtype}, quantization {card.quantization}",
        "context": f"{card.context_length:,} tokens",
        "defaults": _defaults(card, server),
        "adapters": f"{live} ({config.adapters.max_loras} slots, rank up to {config.adapters.max_lora_rank})",
        "checkpoints": checkpoints_text(served.run),
        "memory": f"weights {human_bytes(card.weight_bytes)}, KV cache up to {human_bytes(kv_bytes)}",
        "MLX limits": f"{human_bytes(limits.memory)} in all, buffer cache up to {human_bytes(limits.cache)}, {wired}",
        "device": f"{served.device}, BLAS {BLAS.name}",
        "access": _access(server),
        **_cluster(config, port),
        "base URL": f"{url}/v1",
        **({"dashboard": f"{url}/dashboard"} if server.dashboard else {}),
        "see also": "  ".join(url + path for path in ("/v1/models", "/metrics", "/debug/state", "/docs")),
    }
    lines = [f"MLX ParaLLM {__version__} is ready", *(f"  {name:<11} {fact}" for name, fact in facts.items())]
    return "\n".join([*lines, "", f"  {_curl(server, url)}", "", *(_WARNING + line for line in _warnings(server))])


def show(served: Served, config: Config, port: int, stream: TextIO | None = None) -> None:
    """Writes the banner to `stream` (default: stderr), with styles if it is a terminal. If the log is lines of JSON, it
    is logged instead, and so is each warning."""
    if config.server.log_format == "json":
        _log.info("%s", render(served, config, port))
        for warning in _warnings(config.server):
            _log.warning("%s", warning)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream or sys.stderr, highlight=False)
    for number, line in enumerate(render(served, config, port).splitlines()):
        style = "bold red" if line.startswith(_WARNING) else "bold" if number == 0 else ""
        console.print(Text(line, style=style), soft_wrap=True)


def listed(names: Sequence[str]) -> str:
    """`none`, or `math, tone`, or the first few names and the number of the others."""
    others = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {others} more" if others > 0 else "") or "none"


def checkpoints_text(run: Run | None) -> str:
    """The folder of a run's checkpoints, and how to resume the run."""
    if run is None:
        return "none are saved"
    if run.resumed:
        return f"{run.path}, resumed"
    return f"{run.path}, a new run" + ("; --resume resumes the newest" if run.own else "")


def _cluster(config: Config, port: int) -> dict[str, str]:
    """How other nodes join this one, or which one this node has joined."""
    cluster = config.cluster
    if cluster.connect_to is not None:
        return {"cluster": f"a replica of {cluster.connect_to}"}
    if not cluster.share_model:
        return {}
    where = "MLX_PARALLM_CLUSTER_TOKEN here" if cluster.token else f"in {cluster.state_dir.absolute() / 'token'}"
    address = cluster.advertise or f"HOST:{port}"
    return {"cluster": f"other nodes join with --connect-to {address} and the token, which is {where}"}


def _access(server: ServerConfig) -> str:
    reach = "this machine only" if is_loopback(server.host) else f"beyond this machine (bound to {server.host})"
    named = [f"keys in {server.keys_file}"] if server.keys_file else []
    keys = [*(["API key required"] if server.api_key or named else ["no API key"]), *named]
    return ", ".join([reach, *keys])


def _defaults(card: ModelCard, server: ServerConfig) -> str:
    """What sampling fields are that a request leaves out."""
    if server.generation_config is GenerationConfig.NONE or not card.generation_defaults:
        return "temperature 1, no filters, no penalties"
    given = ", ".join(f"{name} {value:g}" for name, value in card.generation_defaults.items())
    return f"{given} (from the model; --generation-config none for OpenAI's)"


def _curl(server: ServerConfig, url: str) -> str:
    key = ' -H "Authorization: Bearer $MLX_PARALLM_API_KEY"' if server.api_key or server.keys_file else ""
    return f"curl {shlex.quote(f'{url}/v1/completions')}{key} -d {shlex.quote(_EXAMPLE)}"


def _warnings(server: ServerConfig) -> Iterator[str]:
    if not server.api_key and not server.keys_file and not is_loopback(server.host):
        yield (
            f"bound to {server.host} without an API key: anyone who can reach this machine can use it. "
            "Set MLX_PARALLM_API_KEY or --keys-file, or bind to 127.0.0.1."
        )
    if not BLAS.fast:
        yield BLAS.problem
