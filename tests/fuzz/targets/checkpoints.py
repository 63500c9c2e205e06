"""Folders of checkpoints, with manifests whose checksums are right: a start lists what can be used, and a load gives
the weights or an error."""

import hashlib
import json
import logging
import tempfile
from contextlib import suppress
from pathlib import Path

from fuzz.mutation import json_with, of_files, safetensors_with, unpacked
from saves import NAME, Q_PROJ, manager

from mlx_parallm.adapters.checkpoints import Manifest
from mlx_parallm.errors import AdapterFileError, UnknownModelError

logging.disable(logging.WARNING)
FILES = ("manifest.json", "adapters.safetensors", "adapter_config.json", "optimizer.bin")
FIELDS = [*Manifest.model_fields, "sha256", "bytes", "checkpoint-1", *FILES]
mutated = of_files(
    {
        ".json": json_with(FIELDS, ("math", "best", "checkpoint-1", "q_proj", "../math")),
        ".safetensors": safetensors_with([f"{Q_PROJ}.lora_a", f"{Q_PROJ}.lora_b"]),
    }
)


def sealed(manifest, files):
    """The manifest with the checksums of these files, and its own; as it is if no checksum can make it valid."""
    with suppress(ValueError, TypeError, RecursionError):
        fields = json.loads(manifest)
        sums = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
        return Manifest.model_validate_json(json.dumps({**fields, "files": sums, "checksum": ""})).render()
    return manifest


def run(data):
    given = unpacked(data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / NAME / "checkpoint-1"
        folder.mkdir(parents=True)
        files = {file: given[file] for file in FILES[1:] if file in given}
        for file, content in files.items():
            (folder / file).write_bytes(content)
        (folder / FILES[0]).write_bytes(sealed(given.get(FILES[0], b""), files))
        for file in ("latest", "tags.json"):
            if file in given:
                (folder.parent / file).write_bytes(given[file])
        store = manager(Path(name))
        for card in store.cards():
            assert card.adapter.name == NAME
            assert store.newest_version(NAME) >= card.adapter.version
        for which in ("latest", "checkpoint-1", "best"):
            with suppress(AdapterFileError, UnknownModelError):
                assert store.load_checkpoint(NAME, which).weights.pairs
