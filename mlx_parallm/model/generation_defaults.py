"""The sampling options that a model's authors recommend, from its `generation_config.json` (Transformers' format)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "generation_config.json"
BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (math.ulp(0), 10),
    "max_new_tokens": (1, 2**31 - 1),
}
"""The options that are read, with their smallest and largest values."""
WHOLE = frozenset({"top_k", "max_new_tokens"})


def generation_defaults(source: Path) -> dict[str, float]:
    """The options in the file of a model's folder; none if there is no file, as for a model that is one file itself.
    Those that cannot be used are logged and left out."""
    try:
        options = json.loads((source / FILE).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", FILE, error)
        return {}
    sent = options if isinstance(options, dict) else {}
    found = {name: sent[name] for name in BOUNDS if sent.get(name) is not None}
    for name in [name for name, value in found.items() if not _usable(name, value)]:
        log.warning("%s: %s is not used: %r is not a number from %g to %g", FILE, name, found.pop(name), *BOUNDS[name])
    return found


def _usable(name: str, value: object) -> bool:
    kinds = (int,) if name in WHOLE else (int, float)
    low, high = BOUNDS[name]
    return type(value) in kinds and low <= value <= high  # type: ignore[operator]
