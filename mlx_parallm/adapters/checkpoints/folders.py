"""Finds the adapter that a path into a run means: a run, an adapter of it, `latest`, a tag, or a checkpoint.

runs/words                    the adapter of the run, if it has one       ─┐
runs/words/default            its latest checkpoint                        ├─▶ runs/words/default/checkpoint-15
runs/words/default/latest     the same                                     │
runs/words/default/best       the checkpoint with this tag                ─┘
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mlx_parallm.adapters.checkpoints.index import LATEST, TAGS, TAGS_TYPE, stored_latest
from mlx_parallm.adapters.checkpoints.manifest import MANIFEST, step_of
from mlx_parallm.adapters.checkpoints.runs import is_run
from mlx_parallm.errors import AdapterFileError


def adapter_in(path: Path) -> Path:
    """The folder of the checkpoint that a path means; the path itself if it means none.

    Raises:
        AdapterFileError: it is a run with several adapters.
    """
    with suppress(OSError):  # what cannot be looked at is for the reader of the files to report
        if path.is_dir():
            return _latest_of(path) or _only_adapter_of(path) or path
        if path.name == LATEST:
            return _latest_of(path.parent) or path
        return _tagged(path) or path
    return path


def _latest_of(adapter: Path) -> Path | None:
    """The checkpoint that `latest` names or, if that one is gone, the one with the highest step."""
    found = {entry.name: entry for entry in adapter.glob("checkpoint-*") if (entry / MANIFEST).is_file()}
    steps = {name: step for name in found if (step := step_of(name)) is not None}
    name = stored_latest(adapter / LATEST)
    return found[name if name in steps else max(steps, key=lambda name: steps[name])] if steps else None


def _only_adapter_of(run: Path) -> Path | None:
    if not is_run(run):
        return None
    adapters = {entry.name: latest for entry in sorted(run.iterdir()) if (latest := _latest_of(entry))}
    if len(adapters) > 1:
        raise AdapterFileError(
            f"{run.name} is a run with several adapters, {', '.join(adapters)}: name one of these folders", "lora_path"
        )
    return next(iter(adapters.values()), None)


def _tagged(path: Path) -> Path | None:
    tags = path.with_name(TAGS)
    if not tags.is_file():
        return None
    try:
        name = TAGS_TYPE.validate_json(tags.read_bytes(), strict=True).get(path.name, "")
    except ValueError:
        return None
    return path.with_name(name) if step_of(name) is not None else None
