"""What must be in the folder of a run, whatever has happened to its server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.durability import kills
from mlx_parallm.adapters.checkpoints import CheckpointFolder, read_manifest, verify
from mlx_parallm.adapters.runs import LOCK, KeptVersions
from mlx_parallm.errors import ParaLLMError
from mlx_parallm.rl.runs.record import read_record

_DIGEST_BYTES = 32


@dataclass
class Acknowledged:
    """What a server has answered with success. `tags`: the step of the checkpoint that has a tag. `loaded`: the newest
    version of the adapter `tone`."""

    journal: kills.Acknowledged = field(default_factory=kills.Acknowledged)
    tags: dict[str, int] = field(default_factory=dict)
    loaded: int = 0


def lost(run: Path, acknowledged: Acknowledged, torn: bool = False) -> list[str]:
    """What of it is not in the folder of a server, and what there is damaged. `torn`: the server was killed amid a
    write, so one line of a log may be cut."""
    try:
        missing, twice = kills.missing(run, acknowledged.journal)
        record = read_record(run / "kept")
        numbers = KeptVersions(run / "kept").of("tone").last
    except ParaLLMError as error:
        return [str(error)]
    found = [f"{missing} entries of the journal"] * (missing > 0) + [f"{twice} trained twice"] * (twice > 0)
    if record is not None and not (run / "kept" / LOCK).read_text().startswith(record.id):
        found.append("the run's id")
    if numbers < acknowledged.loaded:
        found.append(f"tone@{acknowledged.loaded}: the last number is {numbers}")
    found += _checkpoints(run / "kept" / "default", acknowledged.tags)
    found += (f"{path.name} is damaged" for path in (run / "prefixes").glob("*.kv") if not _is_whole(path))
    return [*found, *_lines(run, torn)]


def _checkpoints(folder: Path, tags: dict[str, int]) -> Iterator[str]:
    for path in folder.glob("checkpoint-*"):
        try:
            verify(path, read_manifest(path))
        except (OSError, ValueError, ParaLLMError) as error:
            yield f"{path.name}: {error}"
    stored = CheckpointFolder(folder) if folder.exists() else None
    for tag, step in tags.items():
        if stored is None or (manifest := stored.resolve(tag)) is None or manifest.step != step:
            yield f"the tag {tag} of step {step}"


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _lines(run: Path, torn: bool) -> list[str]:
    """Lines of the logs that are no JSON, without one that may be cut."""
    broken = list[str]()
    for path in (*run.glob("*.jsonl"), *run.glob("*.log"), *run.glob("kept/*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                json.loads(line)
            except ValueError:
                broken.append(f"{path.name}: {line[:80]!r}")
    return broken if len(broken) > torn else []
