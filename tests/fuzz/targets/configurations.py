"""Files of settings, after a line that says which: our yaml, and retrain's TOML. A configuration, or one error that
names the key."""

import tempfile
from pathlib import Path

from fuzz.mutation import after_first_line, with_words

from mlx_parallm.config.resolve import render, resolve
from mlx_parallm.config.sources import KEYS, SECTIONS
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.retrain.settings import read_retrain

WORDS = (
    "null", "true", "1e400", "0x_", "!!python/object:os.system", "&a ", "*a", "<<: *a", "? ", ".nan", "~", "- ",
    "[" * 900,
    "[inference]\n", "[model]\n", " = ", '"""', "1979-05-27", "{a = 1}", "{", "\n  ", ": ", "\t",
)  # fmt: skip
mutated = after_first_line(
    with_words(*KEYS, *SECTIONS, *(key.rpartition(".")[2] + ": " for key in KEYS), *WORDS), ["yaml", "toml"]
)


def run(data):
    kind, _, content = data.partition(b"\n")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "settings"
        path.write_bytes(content)
        try:
            if kind == b"toml":
                read_retrain(path)
            else:
                render(resolve({}, {}, path))
        except ConfigError as error:
            str(error).encode()
