"""Archives of adapters: what is accepted, and how the head keeps them."""

import io
import tarfile
import tracemalloc

import pytest

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import AdapterFileError, InvalidRequestError, UnknownModelError
from mlx_parallm.extras.cluster.archive import digest, pack, unpack
from mlx_parallm.extras.cluster.head import AdapterArchives

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REF = AdapterRef("math", 3)


def tar(*entries):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content, kind in entries:
            entry = tarfile.TarInfo(name)
            entry.size, entry.type = len(content), kind
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def file(name, content=b"x"):
    return (name, content, tarfile.REGTYPE)


def sparse(size):
    """An archive whose config has `size` zeros that are not in it, as GNU tar writes one."""
    entry = tarfile.TarInfo(CONFIG)
    entry.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % size  # realsize
    header[386:410] = b"%011o\0%011o\0" % (size, 0)  # the only piece: nothing, at the end
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + GOOD


GOOD = tar(file(CONFIG), file(WEIGHTS))


def test_a_folder_arrives_as_it_was_packed(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / CONFIG).write_bytes(b"{}")
    (source / WEIGHTS).write_bytes(b"\x00" * 5000)
    (source / "notes.txt").write_text("stay here")
    archive = pack(source)
    assert archive == pack(source)
    unpack(archive, tmp_path / "there")
    assert {each.name: each.read_bytes() for each in (tmp_path / "there").iterdir()} == {
        CONFIG: b"{}",
        WEIGHTS: b"\x00" * 5000,
    }


@pytest.mark.parametrize(
    "archive",
    [
        b"no archive at all",
        b"",
        GOOD[:600],
        tar(file(CONFIG)),
        tar(file(CONFIG), file(WEIGHTS), file("more.txt")),
        tar(file(CONFIG), file(f"../{WEIGHTS}")),
        tar(file(CONFIG), (WEIGHTS, b"", tarfile.SYMTYPE)),
        tar(file(CONFIG), (WEIGHTS, b"x", tarfile.CONTTYPE)),
        tar(file(CONFIG), ("a", b"9" * 30 + b" path=a\n", tarfile.XHDTYPE)),
    ],
    ids=["text", "empty", "cut off", "no weights", "another file", "a path", "a link", "another kind", "a length"],
)
def test_what_is_no_adapter_is_refused_and_leaves_nothing(tmp_path, archive):
    with pytest.raises(AdapterFileError):
        unpack(archive, tmp_path / "there")
    with pytest.raises(AdapterFileError):
        AdapterArchives(tmp_path / "kept").put(REF, archive, digest(archive), 0)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_a_sparse_file_takes_no_memory(tmp_path):
    tracemalloc.start()
    try:
        with pytest.raises(AdapterFileError, match="no adapter's file"):
            unpack(sparse(1 << 28), tmp_path / "there")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_archive_is_kept_until_it_is_removed(tmp_path):
    kept = AdapterArchives(tmp_path)
    with pytest.raises(UnknownModelError):
        kept.path(REF)
    with pytest.raises(InvalidRequestError, match="SHA-256"):
        kept.put(REF, GOOD, digest(b"other"), 0)
    version = kept.put(REF, GOOD, digest(GOOD).upper(), 7)
    assert (version.ref, version.bytes, version.fence) == (REF, len(GOOD), 7)
    assert kept.put(REF, GOOD, digest(GOOD), 7) == version
    assert kept.path(REF).read_bytes() == GOOD
    kept.remove(REF)
    with pytest.raises(UnknownModelError):
        kept.path(REF)
