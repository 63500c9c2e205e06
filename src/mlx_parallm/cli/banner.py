"""What a server says when it is ready: on stderr, styled on a terminal, plain text elsewhere."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TextIO

from mlx_parallm import __version__
from mlx_parallm.adapters.runs import Run
from mlx_parallm.cli.text import listed
from mlx_parallm.config import human_bytes, is_loopback
from mlx_parallm.core import ModelCard

_EXAMPLE = '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
_WARNING = "WARNING: "
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that a client on this machine can use, for those that stand for every interface."""


@dataclass(frozen=True, slots=True)
class BannerInfo:
    """`host` as configured, `port` as bound; `authenticated`: clients must send a key; `warnings` of one line each.

    `mlx_bytes`: all that MLX may take, `mlx_cache_bytes` of it in freed buffers; `mlx_wired_bytes` None: it wires none.
    `run`: where checkpoints are kept; None: nowhere. `adapters`: names that requests can use now. `adapter_slots` of
    them fit in one batch, each of a rank up to `adapter_rank`; 0 slots: the server takes none.
    """

    model: ModelCard
    adapters: tuple[str, ...]
    kv_bytes: int
    mlx_bytes: int
    mlx_cache_bytes: int
    mlx_wired_bytes: int | None
    device: str
    blas: str
    host: str
    port: int
    authenticated: bool
    warnings: tuple[str, ...] = ()
    adapter_slots: int = 0
    adapter_rank: int = 0
    run: Run | None = None


def base_url(host: str, port: int) -> str:
    """Where a client on this machine finds a server bound to `host`, without a trailing slash."""
    address = _REACHABLE.get(host, host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def render(info: BannerInfo) -> str:
    """The banner as plain text; every warning is one line that starts with WARNING."""
    url = base_url(info.host, info.port)
    card = info.model
    facts = {
        "model": f"{card.name}, {card.parameters / 1e6:,.0f}M parameters",
        "weights": f"{card.dtype}, quantization {card.quantization}",
        "context": f"{card.context_length:,} tokens",
        "adapters": _adapters(info),
        "checkpoints": where_kept(info.run),
        "memory": f"weights {human_bytes(card.weight_bytes)}, KV cache up to {human_bytes(info.kv_bytes)}",
        "MLX limits": _limits(info),
        "device": f"{info.device}, BLAS {info.blas}",
        "access": _access(info),
        "base URL": f"{url}/v1",
        "see also": "  ".join(url + path for path in ("/v1/models", "/metrics", "/debug/state", "/docs")),
    }
    lines = [f"MLX ParaLLM {__version__} is ready", *(f"  {name:<11} {fact}" for name, fact in facts.items())]
    return "\n".join([*lines, "", f"  {_curl(info, url)}", "", *(_WARNING + line for line in _warnings(info))])


def show(info: BannerInfo, stream: TextIO | None = None) -> None:
    """Writes the banner to `stream` (stderr), with styles when that is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream or sys.stderr, highlight=False)
    for number, line in enumerate(render(info).splitlines()):
        style = "bold red" if line.startswith(_WARNING) else "bold" if number == 0 else ""
        console.print(Text(line, style=style), soft_wrap=True)


def _limits(info: BannerInfo) -> str:
    wired = "none wired" if info.mlx_wired_bytes is None else f"{human_bytes(info.mlx_wired_bytes)} wired"
    return f"{human_bytes(info.mlx_bytes)} in all, buffer cache up to {human_bytes(info.mlx_cache_bytes)}, {wired}"


def _adapters(info: BannerInfo) -> str:
    room = f" ({info.adapter_slots} slots, rank up to {info.adapter_rank})" if info.adapter_slots else ""
    return listed(info.adapters) + room


def where_kept(run: Run | None) -> str:
    """Where a run's checkpoints are, and how to resume it."""
    if run is None:
        return "none are kept"
    if run.resumed:
        return f"{run.path}, resumed"
    return f"{run.path}, a new run" + ("; --resume resumes the newest" if run.own else "")


def _access(info: BannerInfo) -> str:
    reach = "this machine only" if is_loopback(info.host) else f"beyond this machine (bound to {info.host})"
    return f"{reach}, {'API key required' if info.authenticated else 'no API key'}"


def _curl(info: BannerInfo, url: str) -> str:
    key = ' -H "Authorization: Bearer $MLX_PARALLM_API_KEY"' if info.authenticated else ""
    return f"curl {shlex.quote(f'{url}/v1/completions')}{key} -d {shlex.quote(_EXAMPLE)}"


def _warnings(info: BannerInfo) -> list[str]:
    if info.authenticated or is_loopback(info.host):
        return list(info.warnings)
    exposed = (
        f"bound to {info.host} without an API key: anyone who can reach this machine can use it. "
        "Set MLX_PARALLM_API_KEY, or bind to 127.0.0.1."
    )
    return [exposed, *info.warnings]
