"""Room for connections among the files that the process may have open: a macOS terminal allows 256."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)

FILES_BESIDE = 128
"""What the process opens beside connections: the model, adapters and checkpoints, child processes, logs."""


def allow_connections(wanted: int) -> int:
    """Raises the soft limit of open files to what `wanted` connections need, as far as the hard limit allows.

    Returns:
        Connections that there is room for, at most `wanted`; the log says so where they are fewer.
    """
    if sys.platform == "win32":  # has no such limit
        return wanted
    allowed = _raise_limit(wanted + FILES_BESIDE)
    connections = max(1, min(wanted, allowed - FILES_BESIDE))
    if connections < wanted:
        log.warning(
            "this process may open %d files: at most %d of %d connections are taken; raise the limit (ulimit -n %d)",
            allowed,
            connections,
            wanted,
            wanted + FILES_BESIDE,
        )
    return connections


def _raise_limit(wanted: int) -> int:
    """Open files that are allowed now. Some systems have a maximum below the hard limit that they name: then less is
    tried, down to what is in force."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while target > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):
            target = (target + soft) // 2
        else:
            return target
    return soft
