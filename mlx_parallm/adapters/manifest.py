"""`manifest.json`: facts about a checkpoint, and checksums of each of its files and of the manifest itself."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

import mlx_parallm
from mlx_parallm import atomic
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.core import AdapterRef
from mlx_parallm.errors import AdapterFileError, InvalidRequestError

MANIFEST = "manifest.json"
MAX_STEP = 10**15 - 1
_MAX_METRICS = 256
MAX_BYTES = 1 << 20
"""Of a manifest."""
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,14})")

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name, None if `name` is not `checkpoint-<step>`."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class FileSum(BaseModel):
    """Checksum and size of one file of a checkpoint."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    sha256: Sha256
    bytes: NonNegativeInt


class Sealed(BaseModel):
    """Facts about a folder of files, and their checksums.

    `metrics`: of the training. `created`: Unix time in seconds. `files`: checksum and size by file name. `checksum`:
    SHA-256 of the JSON of all other fields; set only in a manifest that `parse` returned.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    base_fingerprint: str
    metrics: dict[str, FiniteFloat]
    created: NonNegativeInt
    mlx_parallm: str
    files: Annotated[dict[FileName, FileSum], Field(min_length=1)]
    checksum: str = ""

    def render(self) -> bytes:
        """The content of the file, with its checksum."""
        body = self.model_dump(mode="json", exclude={"checksum"})
        return _dump({**body, "checksum": hashlib.sha256(_dump(body)).hexdigest()})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Reads a manifest that `render` wrote, and checks that it is unchanged.

        Raises:
            ValueError: a field is missing, unknown, of a wrong type, or was changed.
        """
        manifest = cls.model_validate_json(data)
        if manifest.render() != data:
            raise ValueError("it was changed after it was written")
        return manifest


class Manifest(Sealed):
    """The content of a checkpoint's `manifest.json`."""

    adapter: str
    version: NonNegativeInt
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    rank: PositiveInt
    alpha: FiniteFloat
    targets: tuple[str, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of checkpoints: oldest first, and by step within the same second."""
        return self.created, self.step


def seal(
    folder: Path,
    version: AdapterRef,
    step: int,
    weights: AdapterWeights,
    metrics: dict[str, float],
    fingerprint: str,
) -> Manifest:
    """Fsyncs all files in `folder`, then writes the manifest there. Step and metrics have been checked.

    Raises:
        ValueError: an entry of `folder` is not a plain file, or has a name that `FileName` does not allow.
    """
    data = Manifest(
        adapter=version.name,
        version=version.version,
        step=step,
        base_fingerprint=fingerprint,
        rank=weights.rank,
        alpha=weights.alpha,
        targets=weights.targets,
        metrics=metrics,
        created=int(time.time()),
        mlx_parallm=mlx_parallm.__version__,
        files=file_sums(folder),
    ).render()
    atomic.write_file(folder / MANIFEST, data)
    atomic.sync(folder)
    return Manifest.parse(data)


def file_sums(folder: Path) -> dict[str, FileSum]:
    """Fsyncs all files in `folder`, and returns their checksums.

    Raises:
        ValueError: an entry is not a plain file, or is a manifest.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name == MANIFEST:
            raise ValueError(f"{path.name} cannot be part of a checkpoint: plain files only")
        atomic.sync(path)
        files[path.name] = file_sum(path)
    return files


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest in `folder`, and checks that it belongs to the checkpoint and adapter that the path names.

    Raises:
        ValueError, OSError: it is missing, damaged or of another checkpoint.
    """
    with (folder / MANIFEST).open("rb") as file:
        manifest = Manifest.parse(file.read(MAX_BYTES))
    if (manifest.adapter, checkpoint_name(manifest.step)) != (folder.parent.name, folder.name):
        raise ValueError(f"it is {checkpoint_name(manifest.step)} of {manifest.adapter}")
    return manifest


def verify(folder: Path, manifest: Manifest) -> None:
    """Checks the files in `folder` against the checksums.

    Raises:
        AdapterFileError: a file is missing, truncated or changed. The message names it.
    """
    try:
        stored = read_manifest(folder)
    except (ValueError, OSError):
        stored = None
    if stored != manifest:
        raise _damaged(folder, MANIFEST)
    for name, expected in manifest.files.items():
        try:
            found = file_sum(folder / name)
        except OSError:
            found = None
        if found != expected:
            raise _damaged(folder, name)


def file_sum(path: Path) -> FileSum:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileSum(sha256=digest, bytes=file.tell())


def check_step(step: int) -> int:
    """Returns `step`. Raises InvalidRequestError if it is not between 0 and MAX_STEP."""
    if not 0 <= step <= MAX_STEP:
        raise InvalidRequestError(f"step must be between 0 and {MAX_STEP}", param="step")
    return step


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as Python floats.

    Raises:
        InvalidRequestError: there are too many, a name is not printable, or a value is not a finite number.
    """
    if len(metrics) > _MAX_METRICS:
        raise InvalidRequestError(f"{len(metrics)} metrics: store at most {_MAX_METRICS}", param="metrics")
    return {_plain(name): _finite(name, value) for name, value in metrics.items()}


def _plain(name: str) -> str:
    if not (0 < len(name) <= 128 and name.isprintable()):
        raise InvalidRequestError("a metric's name must have 1 to 128 printable characters", param="metrics")
    return name


def _finite(name: str, value: float) -> float:
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if math.isfinite(number):
            return number
    raise InvalidRequestError(f"the metric {name} is not a finite number: leave it out", param="metrics")


def _damaged(folder: Path, name: str) -> AdapterFileError:
    checkpoint = f"{folder.parent.name}/{folder.name}"
    return AdapterFileError(
        f"{checkpoint}/{name} is damaged or missing: bring {checkpoint} back from a backup, or delete that folder "
        "and name another checkpoint"
    )


def _dump(body: dict[str, object]) -> bytes:
    return (json.dumps(body, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()
