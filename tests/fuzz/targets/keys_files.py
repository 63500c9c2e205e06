"""The file of named keys: its keys, or one error, after which a server goes on with those that it has."""

import tempfile
from pathlib import Path

from fuzz.mutation import json_with

from mlx_parallm.errors import ConfigError
from mlx_parallm.server.access import NamedKey, read_keys

mutated = json_with([*NamedKey.model_fields, "keys"], ["inference", "train", "admin", "a" * 64, ["math"], "*", "base"])


def run(data):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "keys.json"
        path.write_bytes(data)
        try:
            keys = read_keys(path)
        except ConfigError as error:
            str(error).encode()
            return
        assert len({key.name for key in keys}) == len(keys)
