"""The checkpoints of one adapter: a frozen view of its folder, and reading it back after whatever happened."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from mlx_parallm.adapters import atomic
from mlx_parallm.adapters.manifest import Manifest, read_manifest, step_of, verify
from mlx_parallm.adapters.names import check_name, check_tag
from mlx_parallm.adapters.runs import is_run
from mlx_parallm.core import AdapterRef, CheckpointCard
from mlx_parallm.errors import AdapterFileError, InvalidRequestError

LATEST = "latest"
TAGS = "tags.json"
WEIGHTS = "adapters.safetensors"

_TAGS_TYPE = TypeAdapter(dict[str, str])
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shelf:
    """`manifests`: by checkpoint name. `tags`: from tag to checkpoint name. `latest`: None only while empty.

    `newest_version`: the largest of an adapter version ever seen here, pruned ones included.
    """

    path: Path
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    latest: str | None = None
    newest_version: int = 0

    def resolve(self, which: str) -> str | None:
        """The checkpoint that `checkpoint-<step>`, a tag or `latest` means."""
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
        """All but the newest `keep`, the tagged ones and the latest."""
        names = self.oldest_first()
        kept = {*names[max(0, len(names) - keep) :], *self.tags.values(), self.latest}
        return [name for name in names if name not in kept]

    def adding(self, name: str, manifest: Manifest) -> Shelf:
        return replace(
            self,
            manifests={**self.manifests, name: manifest},
            latest=self.latest or name,
            newest_version=max(self.newest_version, manifest.version),
        )

    def without(self, name: str) -> Shelf:
        return replace(self, manifests={key: value for key, value in self.manifests.items() if key != name})

    def next_step(self) -> int:
        """One more than the largest on disk, damaged ones included."""
        return 1 + max((step for step in map(step_of, _names(self.path)) if step is not None), default=0)


def read_shelves(folder: Path) -> Iterator[Shelf]:
    """One for each adapter's folder in `folder`, swept of what interrupted saves left; other runs are left alone.

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
        yield _read_shelf(path)


def render_tags(tags: Mapping[str, str]) -> bytes:
    return (json.dumps(tags, indent=2, sort_keys=True) + "\n").encode()


def _read_shelf(path: Path) -> Shelf:
    shelf = Shelf(path)
    for name in _names(path):
        try:
            shelf = shelf.adding(name, read_manifest(path / name))
        except (ValueError, OSError) as error:
            _log.warning("%s is skipped, its manifest cannot be used: %s", path / name, error)
    return replace(shelf, tags=_read_tags(shelf), latest=_read_latest(shelf))


def _names(path: Path) -> list[str]:
    """Of folders that are checkpoints, going by their names."""
    return [entry.name for entry in path.iterdir() if step_of(entry.name) is not None and entry.is_dir()]


def _read_tags(shelf: Shelf) -> dict[str, str]:
    """Those that lead somewhere. Where the file is damaged each checkpoint gets a tag, so that none is pruned."""
    path = shelf.path / TAGS
    try:
        stored = _TAGS_TYPE.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        _log.warning("%s cannot be used, so every checkpoint there gets a tag kept-<step>: %s", path, error)
        return {f"kept-{manifest.step}": name for name, manifest in shelf.manifests.items()}
    tags = {tag: name for tag, name in stored.items() if name in shelf.manifests and _is_tag(tag)}
    for tag in stored.keys() - tags.keys():
        _log.warning("%s: tag %r is dropped, %r is no checkpoint", path, tag, stored[tag])
    return tags


def _is_tag(tag: str) -> bool:
    try:
        check_tag(tag)
    except InvalidRequestError:
        return False
    return True


def _read_latest(shelf: Shelf) -> str | None:
    """What the file names, or where that cannot be used the highest step that can."""
    named = _stored_latest(shelf.path / LATEST)
    by_step = sorted(shelf.manifests, key=lambda name: shelf.manifests[name].step, reverse=True)
    for name in sorted(by_step, key=lambda name: name != named):
        if _is_whole(shelf, name):
            if name != named:
                _log.warning("%s names no checkpoint that can be used: going by %s", shelf.path / LATEST, name)
            return name
    return by_step[0] if by_step else None


def _stored_latest(path: Path) -> str:
    """ "" where the file is missing or torn."""
    try:
        name, newline, rest = path.read_bytes().decode().partition("\n")
    except (ValueError, OSError):
        return ""
    return name if newline and not rest else ""


def _is_whole(shelf: Shelf, name: str) -> bool:
    try:
        verify(shelf.path / name, shelf.manifests[name])
    except AdapterFileError as error:
        _log.warning("%s", error)
        return False
    return True
