"""Archives of adapters that nodes send to each other: the files of one adapter, or an error, and nothing outside the
folder."""

import tempfile
from pathlib import Path

from adapter_folders import LAYOUT
from fuzz.mutation import with_words

from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.errors import AdapterFileError
from mlx_parallm.extras.cluster.archive import check, unpack

FILES = {"adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"}
mutated = with_words(
    *FILES, "../adapter_config.json", "ustar\x0000", "ustar  \0", "\0" * 512, "00000000000\0", "77777777777\0",
    *(b"\x80\0\0\0\0\0\0\0\x7f\xff\xff\xff", b"\xff" * 12, "30 path=adapter_config.json\n", "20 size=99999999999\n"),
    *("22 GNU.sparse.major=1\n", "25 GNU.sparse.size=9999\n", *"0123456789xgLKSV"),
)  # fmt: skip


def with_sums(data):
    """The archive with the right checksum in each header, without which nothing else of it is read."""
    blocks = bytearray(data)
    for at in range(0, len(blocks) - 511, 512):
        if blocks[at + 257 : at + 262] == b"ustar":
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + 512])
    return bytes(blocks)


def run(data):
    data = with_sums(data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "adapter"
        try:
            check(data)
            unpack(data, folder)
        except AdapterFileError:
            assert not any(Path(name).iterdir())
            return
        assert {path.name for path in folder.iterdir()} < FILES
        try:
            read_adapter(folder, LAYOUT, 16)
        except AdapterFileError:
            return
