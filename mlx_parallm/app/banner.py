"""The text that a server prints on stderr when it is ready: styled on a terminal, plain elsewhere."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from mlx_parallm import __version__
from mlx_parallm.config import human_bytes, is_loopback
from mlx_parallm.core import ModelCard

if TYPE_CHECKING:  # `cli` imports this module, and must not import MLX with it
    from mlx_parallm.adapters.checkpoints.runs import Run

_EXAMPLE = '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
_WARNING = "WARNING: "
_MAX_NAMES = 8
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that means every interface → the address by which a client on this machine connects."""


@dataclass(frozen=True, slots=True)
class BannerInfo:
    """The facts in the banner.

    adapters: names that requests can use now
    mlx_bytes: all memory that MLX may take; at most `mlx_cache_bytes` of it are freed buffers
    mlx_wired_bytes: None if no memory is wired
    host: as configured; `port`: as bound
    authenticated: whether clients must send a key
    warnings: one line each
    adapter_slots: adapter versions in one batch, each of a rank up to `adapter_rank`; 0 if the server has no adapters
    run: the folder of checkpoints; None if no checkpoints are saved
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
    """The address by which a client on this machine reaches a server bound to `host`, without a trailing slash."""
    address = _REACHABLE.get(host, host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def render(info: BannerInfo) -> str:
    """The banner as plain text. Each warning is one line that starts with WARNING."""
    url = base_url(info.host, info.port)
    card = info.model
    facts = {
        "model": f"{card.name}, {card.parameters / 1e6:,.0f}M parameters",
        "weights": f"{card.dtype}, quantization {card.quantization}",
        "context": f"{card.context_length:,} tokens",
        "adapters": _adapters(info),
        "checkpoints": checkpoints_text(info.run),
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
    """Writes the banner to `stream` (default: stderr), with styles if it is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream or sys.stderr, highlight=False)
    for number, line in enumerate(render(info).splitlines()):
        style = "bold red" if line.startswith(_WARNING) else "bold" if number == 0 else ""
        console.print(Text(line, style=style), soft_wrap=True)


def listed(names: Sequence[str]) -> str:
    """`none`, or `math, tone`, or the first few names and the number of the others."""
    others = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {others} more" if others > 0 else "") or "none"


def _limits(info: BannerInfo) -> str:
    wired = "none wired" if info.mlx_wired_bytes is None else f"{human_bytes(info.mlx_wired_bytes)} wired"
    return f"{human_bytes(info.mlx_bytes)} in all, buffer cache up to {human_bytes(info.mlx_cache_bytes)}, {wired}"


def _adapters(info: BannerInfo) -> str:
    room = f" ({info.adapter_slots} slots, rank up to {info.adapter_rank})" if info.adapter_slots else ""
    return listed(info.adapters) + room


def checkpoints_text(run: Run | None) -> str:
    """The folder of a run's checkpoints, and how to resume the run."""
    if run is None:
        return "none are saved"
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
