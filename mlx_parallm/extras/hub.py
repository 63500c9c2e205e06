"""Adapters on the Hugging Face hub: writes exported ones there, and downloads those that the operator allows.

A hub id is `org/name`, with a folder and a revision if needed: `org/name/folder@revision`. Only the config and the
weights of an adapter are downloaded, which `adapters.files` then reads as it reads all that others have written.
`HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` hold, as for models.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from mlx_parallm.adapters.formats import CONFIG_FILE, MLX_LM_WEIGHTS, PEFT_WEIGHTS
from mlx_parallm.config import human_bytes
from mlx_parallm.errors import ConflictError, InvalidRequestError, StorageError, shown

FOLDER = Path(constants.HF_HOME) / "mlx_parallm_adapters"
"""The cache of downloads, which is apart from that of models, so that it has nothing that was not allowed."""
FILES = (CONFIG_FILE, MLX_LM_WEIGHTS, PEFT_WEIGHTS)
LARGEST_BYTES = 4 * 2**30
_PART = r"[\w-][\w.-]*"
_ID = re.compile(rf"({_PART}/{_PART})((?:/{_PART})*)(?:@({_PART}(?:/{_PART})*))?", re.ASCII)


class AllowedAdapters:
    """Downloads adapters whose ids the operator allows, one at a time. Any thread may use it.

    Args:
        patterns: of ids, such as `org/*`; see `fnmatch`. One without `@` allows the newest revision alone: others
            need not be their owner's, since on the hub anybody's pull request is a revision of a repository.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self._downloading = threading.Lock()

    def has(self, text: str) -> bool:
        """Whether a text is an id that is allowed."""
        patterns = [pattern for pattern in self._patterns if ("@" in pattern) == ("@" in text)]
        return _ID.fullmatch(text) is not None and any(fnmatchcase(text, pattern) for pattern in patterns)

    def download(self, text: str) -> Path:
        """The folder of the adapter with an id, which is downloaded unless the newest one is there. Without the hub,
        it is the one that was downloaded last. Blocks on the network.

        Raises:
            InvalidRequestError: there is none, it is too large, or the hub cannot be reached.
            ConflictError: another one is being downloaded.
        """
        match = _ID.fullmatch(text)
        assert match is not None
        if not self._downloading.acquire(blocking=False):
            raise ConflictError("another adapter is being downloaded; try again when it is loaded")
        try:
            return _downloaded(match[1], match[2].strip("/"), match[3])
        except InvalidRequestError:
            raise
        except Exception as error:  # the hub's client has several that share no class
            raise _problem(text, _reason(error)) from error
        finally:
            self._downloading.release()


def _downloaded(repository: str, folder: str, revision: str | None) -> Path:
    disable_progress_bars()
    patterns = [f"{folder}/{name}" if folder else name for name in FILES]
    options = {"revision": revision, "allow_patterns": patterns, "cache_dir": FOLDER}
    try:
        files = snapshot_download(repository, dry_run=True, **options)
    except DryRunError as error:  # as if there were no hub, unless it has refused
        if isinstance(error.__cause__, RepositoryNotFoundError):
            raise error.__cause__ from None
        try:
            snapshot = snapshot_download(repository, local_files_only=True, **options)
        except LocalEntryNotFoundError:
            raise error.__cause__ or error from None
    else:
        size = sum(file.file_size for file in files)
        if size > LARGEST_BYTES:
            raise _problem(repository, f"has {human_bytes(size)}, more than {human_bytes(LARGEST_BYTES)}")
        snapshot = snapshot_download(repository, **options)
    if not Path(snapshot, folder, CONFIG_FILE).is_file():
        raise _problem(repository, f"it has no {patterns[0]}")
    return Path(snapshot, folder)


def _problem(text: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the adapter {shown(text)} of the hub cannot be loaded: {why}", "lora_path")


def _reason(error: Exception) -> str:
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or the token may not read it"
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


# -- push ------------------------------------------------------------------------------------------

LIBRARIES = {"peft": "peft", "mlx": "mlx", "fused": "mlx", "gguf": "gguf"}
"""What the hub calls the program that opens a format of `mlx_parallm adapters export`."""


def push(folder: Path, repository: str, form: str, base: str, public: bool) -> str:
    """Writes the files of a folder into a repository, in one commit, and a model card if it has none. A repository that
    does not exist is made, and is private unless `public`.

    Args:
        form: what `mlx_parallm adapters export` calls the format.
        base: the hub id of the base model.

    Returns:
        The commit's address.

    Raises:
        StorageError: the hub cannot be reached, or refuses it.
    """
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        added = [CommitOperationAdd(file.relative_to(folder).as_posix(), str(file)) for file in files]
        if not api.file_exists(repository, "README.md"):
            added.append(CommitOperationAdd("README.md", _card(repository, form, base).encode()))
        return str(api.create_commit(repository, added, commit_message=f"An export for {form}").commit_url)
    except Exception as error:  # see `download`
        raise StorageError(f"--push {repository}: {_reason(error)} (a token comes from `hf auth login`)") from error


def _card(repository: str, form: str, base: str) -> str:
    what = "A model with a LoRA adapter in its weights" if form == "fused" else "A LoRA adapter"
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if form == "fused" else "adapter",
        library_name=LIBRARIES[form],
        pipeline_tag="text-generation",
        tags=["mlx-parallm"] if form == "fused" else ["lora", "mlx-parallm"],
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {repository.partition('/')[2]}\n\n{what} of {base}.\n"
