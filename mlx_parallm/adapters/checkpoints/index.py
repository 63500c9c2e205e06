"""CheckpointIndex: which checkpoints an adapter has. It is read from the disk at start, also after a crash."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from mlx_parallm import atomic
from mlx_parallm.adapters.checkpoints.manifest import Manifest, read_manifest, step_of, verify
from mlx_parallm.adapters.checkpoints.runs import is_run
from mlx_parallm.core import AdapterRef, CheckpointCard, check_name, check_tag
from mlx_parallm.errors import AdapterFileError, InvalidRequestError

LATEST = "latest"
TAGS = "tags.json"
WEIGHTS = "adapters.safetensors"

TAGS_TYPE = TypeAdapter(dict[str, str])
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The checkpoints in one adapter's folder at `path`; frozen, so that other threads can read it without a lock.

    `manifests`: by checkpoint name. `tags`: tag → checkpoint name. `latest`: the name of the checkpoint that a request
    for `latest` gets, None only if there is none. `newest_version`: the largest adapter version saved here, including
    those of checkpoints that this process has pruned.
    """

    path: Path
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    latest: str | None = None
    newest_version: int = 0

    def resolve(self, which: str) -> str | None:
        """The name of the checkpoint that `which` means (a name, a tag or `latest`), None if there is none."""
        name = self.latest if which == LATEST else self.tags.get(which, which)
        return name if name in self.manifests else None

    def card(self, name: str) -> CheckpointCard:
        manifest = self.manifests[name]
        tags = [tag for tag, target in self.tags.items() if target == name]
        return CheckpointCard(
            name=name,
            adapter=AdapterRef(manifest.adapter, manifest.version),
            step=manifest.step,
            path=str(self.path / name),
            created=manifest.created,
            tags=tuple(sorted(tags + [LATEST] * (name == self.latest))),
            metrics=manifest.metrics,
            rank=manifest.rank,
            alpha=manifest.alpha,
            targets=manifest.targets,
            bytes=manifest.files[WEIGHTS].bytes if WEIGHTS in manifest.files else 0,
        )

    def oldest_first(self) -> list[str]:
        return sorted(self.manifests, key=lambda name: self.manifests[name].order)

    def surplus(self, keep: int) -> list[str]:
        """Checkpoints to prune: all except the newest `keep`, the tagged ones, and the one that `latest` means."""
        names = self.oldest_first()
        kept = {*names[max(0, len(names) - keep) :], *self.tags.values(), self.latest}
        return [name for name in names if name not in kept]

    def adding(self, name: str, manifest: Manifest) -> CheckpointIndex:
        return replace(
            self,
            manifests={**self.manifests, name: manifest},
            latest=self.latest or name,
            newest_version=max(self.newest_version, manifest.version),
        )

    def without(self, name: str) -> CheckpointIndex:
        return replace(self, manifests={key: value for key, value in self.manifests.items() if key != name})

    def next_step(self) -> int:
        """One more than the largest step on disk, damaged checkpoints included."""
        return 1 + max((step for step in map(step_of, _names(self.path)) if step is not None), default=0)


def read_indexes(folder: Path) -> Iterator[CheckpointIndex]:
    """Reads the index of each adapter's folder in `folder`, and removes what interrupted saves left there. Folders of
    other runs are left alone.

    Raises:
        OSError: a folder cannot be read.
    """
    for path in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        if is_run(path):
            continue
        try:
            check_name(path.name)
        except InvalidRequestError:
            _log.warning("%s is skipped: its name is not one that an adapter can have", path)
            continue
        atomic.sweep(path)
        yield _read_index(path)


def render_tags(tags: Mapping[str, str]) -> bytes:
    return (json.dumps(tags, indent=2, sort_keys=True) + "\n").encode()


def _read_index(path: Path) -> CheckpointIndex:
    index = CheckpointIndex(path)
    for name in _names(path):
        try:
            index = index.adding(name, read_manifest(path / name))
        except (ValueError, OSError) as error:
            _log.warning("%s is skipped, its manifest cannot be used: %s", path / name, error)
    return replace(index, tags=_read_tags(index), latest=_read_latest(index))


def _names(path: Path) -> list[str]:
    """The names of folders that are named like checkpoints."""
    return [entry.name for entry in path.iterdir() if step_of(entry.name) is not None and entry.is_dir()]


def _read_tags(index: CheckpointIndex) -> dict[str, str]:
    """The tags of checkpoints that exist. If the file is damaged, all checkpoints get a tag, so that none is pruned."""
    path = index.path / TAGS
    try:
        stored = TAGS_TYPE.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        _log.warning("%s cannot be used, so every checkpoint there gets a tag kept-<step>: %s", path, error)
        return {f"kept-{manifest.step}": name for name, manifest in index.manifests.items()}
    tags = {tag: name for tag, name in stored.items() if name in index.manifests and _is_tag(tag)}
    for tag in stored.keys() - tags.keys():
        _log.warning("%s: tag %r is dropped: it is not valid, or %r is no checkpoint", path, tag, stored[tag])
    return tags


def _is_tag(tag: str) -> bool:
    try:
        check_tag(tag)
    except InvalidRequestError:
        return False
    return True


def _read_latest(index: CheckpointIndex) -> str | None:
    """The checkpoint that the file `latest` names. If that one is missing or damaged, the undamaged checkpoint with the
    highest step is taken; if all are damaged, the one with the highest step."""
    named = stored_latest(index.path / LATEST)
    by_step = sorted(index.manifests, key=lambda name: index.manifests[name].step, reverse=True)
    for name in sorted(by_step, key=lambda name: name != named):
        if _is_whole(index, name):
            if name != named:
                _log.warning("%s names no checkpoint that can be used: %s is used instead", index.path / LATEST, name)
            return name
    return by_step[0] if by_step else None


def stored_latest(path: Path) -> str:
    """The name in the file `latest`, empty if the file is missing or incomplete."""
    try:
        name, newline, rest = path.read_bytes().decode().partition("\n")
    except (ValueError, OSError):
        return ""
    return name if newline and not rest else ""


def _is_whole(index: CheckpointIndex, name: str) -> bool:
    try:
        verify(index.path / name, index.manifests[name])
    except AdapterFileError as error:
        _log.warning("%s", error)
        return False
    return True
