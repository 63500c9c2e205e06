"""The files of cached prefixes: what is written is read again, and what is not what it should be is a miss."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from harness import Inline

from mlx_parallm import atomic
from mlx_parallm.errors import StorageError
from mlx_parallm.kv.cache import LoRABatchedKVCache
from mlx_parallm.kv.device_memory import DeviceMemory
from mlx_parallm.kv.disk import (
    _RETRY_S,
    BlockName,
    HostBlock,
    PrefixStore,
    block_names,
    encode,
    model_key,
    root_key,
    shapes,
)
from mlx_parallm.kv.host import HostCopies
from mlx_parallm.kv.states import StateArena, StateBatch
from mlx_parallm.model.layer_state import KVLayout, LayerSpec, RecurrentSpec

TEXT = [(i * i) % 251 for i in range(2000)]
LAYOUT = KVLayout((LayerSpec(2, 4, 3), LayerSpec(1, 2, 2, window=100)), mx.bfloat16)
BLOCK_BYTES = LAYOUT.bytes_per_token * 64


def store(folder: Path, layout: KVLayout = LAYOUT, fingerprint: str = "model", limit: int = 1 << 30) -> PrefixStore:
    return PrefixStore(folder, fingerprint, layout, limit, Inline())


def names(kept: PrefixStore, ids: Sequence[int] = TEXT[:400], root: str = "root") -> list[BlockName]:
    return list(block_names(root_key(kept.model, root), ids))


def block(name: BlockName, layout: KVLayout = LAYOUT) -> HostBlock:
    rng = np.random.default_rng(name.depth)
    return HostBlock(name, [rng.integers(0, 255, shape, np.uint8) for shape in shapes(layout).values()])


def filled(folder: Path, **kwargs) -> tuple[PrefixStore, list[BlockName]]:
    """A store that has the six full blocks of a text of 400 tokens."""
    kept = store(folder, **kwargs)
    kept.write([block(name) for name in names(kept)])
    return kept, names(kept)


def file_of(folder: Path, name: BlockName) -> Path:
    return folder / f"{name.key.hex()}.kv"


def read(kept: PrefixStore, wanted: Sequence[BlockName]) -> list[int]:
    """The depths of the blocks that are read, whose content is compared."""
    blocks = kept.read(wanted).result()
    for got in blocks:
        expected = block(got.name).arrays
        assert all(np.array_equal(a, b) for a, b in zip(got.arrays, expected, strict=True))
    return [got.name.depth for got in blocks]


def test_what_one_server_writes_the_next_one_reads(tmp_path) -> None:
    filled(tmp_path / "new" / "cache")
    kept = store(tmp_path / "new" / "cache")
    assert all(name.key in kept for name in names(kept))
    assert read(kept, names(kept)) == [1, 2, 3, 4, 5, 6]


def test_the_files_are_for_their_user_only(tmp_path) -> None:
    folder = tmp_path / "cache"
    _, wanted = filled(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file_of(folder, name).stat().st_mode) for name in wanted} == {0o600}


def test_no_name_is_that_of_another_model_layout_root_or_text(tmp_path) -> None:
    wide = KVLayout((LayerSpec(2, 4, 4), *LAYOUT.layers[1:]), LAYOUT.dtype)
    window = KVLayout((LAYOUT.layers[0], LayerSpec(1, 2, 2, window=99)), LAYOUT.dtype)
    half = KVLayout(LAYOUT.layers, mx.float16)
    models = [model_key("model", LAYOUT), model_key("other", LAYOUT), *(model_key("model", x) for x in (wide, window))]
    models.append(model_key("model", half))
    roots = [root_key(model, root) for model in models for root in ("", "salt")]
    texts = (TEXT[:400], [1, *TEXT[1:400]], TEXT[64:464])
    keys = [name.key for root in roots for text in texts for name in block_names(root, text)]
    assert len(set(keys)) == len(keys) == 10 * 3 * 6


def test_a_name_depends_on_all_tokens_before(tmp_path) -> None:
    kept = store(tmp_path)
    one, other = names(kept, TEXT[:400]), names(kept, [*TEXT[:100], 7, *TEXT[101:400]])
    assert [a.key == b.key for a, b in zip(one, other, strict=True)] == [True] + [False] * 5
    assert len(names(kept, TEXT[:384])) == 5, "the last token is computed"


Damage = Callable[[Path, list[BlockName], PrefixStore], None]


def truncated(folder: Path, wanted: list[BlockName], _: PrefixStore) -> None:
    os.truncate(file_of(folder, wanted[2]), 100)


def emptied(folder: Path, wanted: list[BlockName], _: PrefixStore) -> None:
    os.truncate(file_of(folder, wanted[2]), 0)


def one_bit(folder: Path, wanted: list[BlockName], _: PrefixStore) -> None:
    data = bytearray(file_of(folder, wanted[2]).read_bytes())
    data[-100] ^= 1
    file_of(folder, wanted[2]).write_bytes(data)


def another_block(folder: Path, wanted: list[BlockName], _: PrefixStore) -> None:
    file_of(folder, wanted[2]).write_bytes(file_of(folder, wanted[3]).read_bytes())


def another_layout(folder: Path, wanted: list[BlockName], _: PrefixStore) -> None:
    layout = KVLayout((LayerSpec(2, 4, 4), *LAYOUT.layers[1:]), LAYOUT.dtype)
    file_of(folder, wanted[2]).write_bytes(encode(block(wanted[2], layout), shapes(layout)))


def more_layers(folder: Path, wanted: list[BlockName], _: PrefixStore) -> None:
    layout = KVLayout((*LAYOUT.layers, LayerSpec(1, 2, 2)), LAYOUT.dtype)
    file_of(folder, wanted[2]).write_bytes(encode(block(wanted[2], layout), shapes(layout)))


@pytest.mark.parametrize("damage", [truncated, emptied, one_bit, another_block, another_layout, more_layers])
def test_a_file_that_is_not_the_block_is_a_miss_and_is_removed(tmp_path, damage: Damage) -> None:
    _, wanted = filled(tmp_path)
    kept = store(tmp_path)
    damage(tmp_path, wanted, kept)
    assert read(kept, wanted) == [1, 2]
    assert kept.damaged == 1
    assert wanted[2].key not in kept
    assert not file_of(tmp_path, wanted[2]).exists()
    kept.write([block(wanted[2])])
    assert read(kept, wanted) == [1, 2, 3, 4, 5, 6]


def test_a_file_that_another_server_has_removed_is_a_miss(tmp_path) -> None:
    kept, wanted = filled(tmp_path)
    file_of(tmp_path, wanted[1]).unlink()
    assert wanted[1].key in kept
    assert read(kept, wanted) == [1]
    assert (kept.damaged, wanted[1].key in kept) == (0, False)


def test_beyond_the_limit_the_least_recently_used_chains_go_from_their_end(tmp_path) -> None:
    kept, wanted = filled(tmp_path)
    size = file_of(tmp_path, wanted[0]).stat().st_size
    for name in wanted:
        path = file_of(tmp_path, name)
        os.utime(path, (path.stat().st_mtime - 1000,) * 2)
    limited = store(tmp_path, limit=size * 8)
    newer = names(kept, TEXT[1000:1400])
    limited.write([block(name) for name in newer[:4]])
    assert [name.key in limited for name in (*wanted, *newer)] == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 2
    assert len(list(tmp_path.iterdir())) == 8
    assert read(limited, wanted) == [1, 2, 3, 4]
    limited.write([block(name) for name in newer[4:]])
    assert [name.key in limited for name in (*wanted, *newer)] == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 2, (
        "reading is use"
    )


def test_files_of_a_time_when_the_clock_was_ahead_make_room_for_new_ones(tmp_path) -> None:
    kept, wanted = filled(tmp_path)
    for name in wanted:
        os.utime(file_of(tmp_path, name), (time.time() + 1e7,) * 2)
    limited = store(tmp_path, limit=file_of(tmp_path, wanted[0]).stat().st_size * len(wanted))
    newer = names(kept, TEXT[1000:1400])
    limited.write([block(name) for name in newer[:4]])
    assert all(name.key in limited for name in newer[:4])


def test_what_another_version_of_mlx_lm_has_computed_is_not_used(monkeypatch) -> None:
    now = model_key("model", LAYOUT)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1")
    assert model_key("model", LAYOUT) != now


def test_a_full_disk_is_tried_again_only_after_a_while_and_warned_about_once(tmp_path, monkeypatch, caplog) -> None:
    kept, wanted = filled(tmp_path)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tried = 0

    def no_room(descriptor: int) -> None:
        nonlocal tried
        tried += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    others = names(kept, TEXT[1000:1400])
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_room)
        for _ in range(2):
            for name in others:
                if kept.may_write:
                    kept.write([block(name)])
            assert not kept.writes
            now += _RETRY_S
    assert tried == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"cached prefixes cannot be written to {tmp_path} now: No space left on device"
    ]
    assert len(list(tmp_path.iterdir())) == 6, "nothing is left behind"
    assert read(kept, wanted) == [1, 2, 3, 4, 5, 6]
    assert kept.may_write, "there may be room again"
    kept.write([block(name) for name in others])
    assert len(list(tmp_path.iterdir())) == 12


def test_a_disk_that_became_read_only_is_still_read(tmp_path, monkeypatch) -> None:
    kept, wanted = filled(tmp_path)
    one_bit(tmp_path, wanted, kept)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    assert read(kept, wanted) == [1, 2], "the third is damaged, and cannot be removed"
    assert read(kept, wanted[3:]) == [4, 5, 6]
    assert [name.key in kept for name in wanted] == [True] * 2 + [False] + [True] * 3


def test_what_a_killed_server_left_is_removed_and_what_another_one_is_writing_is_not(tmp_path, monkeypatch) -> None:
    kept, wanted = filled(tmp_path)

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            atomic.replace_file(file_of(tmp_path, names(kept, TEXT[1000:1400])[0]), b"x" * 1000)
    assert len(list(tmp_path.iterdir())) == 7
    store(tmp_path)
    assert len(list(tmp_path.iterdir())) == 7, "it may be of a server that runs"
    (left,) = tmp_path.glob(".*")
    os.utime(left, (time.time() - 100,) * 2)
    assert read(store(tmp_path), wanted) == [1, 2, 3, 4, 5, 6]
    assert len(list(tmp_path.iterdir())) == 6


def test_files_of_others_stay(tmp_path) -> None:
    for name in ("notes.txt", "cafe.kv", "x.kv"):
        (tmp_path / name).write_text("mine")
    kept = store(tmp_path, limit=1)
    kept.write([block(names(kept)[0])])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cafe.kv", "notes.txt", "x.kv"]


# ---- the pool ------------------------------------------------------------------------------------


def pool(blocks: int = 100) -> LoRABatchedKVCache:
    return LoRABatchedKVCache(LAYOUT, DeviceMemory(blocks * BLOCK_BYTES), 4096)


def cached(cache: LoRABatchedKVCache, ids: Sequence[int]) -> None:
    row = cache.open(len(ids))
    assert row is not None
    rng = np.random.default_rng(len(ids))
    for group, table in zip(cache.groups, row.tables, strict=False):
        for block_id in table:
            empty = group.arena.read(block_id)
            group.arena.write_block(block_id, [rng.integers(0, 255, each.shape, np.uint8) for each in empty])
    row.computed = len(ids)
    cache.close(row, "root", ids)


def saved(cache: LoRABatchedKVCache) -> list[HostBlock]:
    """All full blocks of the one chain in the cache."""
    nodes = [node for node, _ in HostCopies(cache).unsaved(1000)]
    key = root_key(model_key("model", LAYOUT), "root")
    ids = [token for node in nodes for token in node.ids]
    blocks = zip(block_names(key, [*ids, 0]), nodes, strict=True)
    return [HostBlock(name, HostCopies(cache).read(node, is_state=False)) for name, node in blocks]


def found(cache: LoRABatchedKVCache, ids: Sequence[int]) -> int:
    cache.check_integrity()
    return cache.cached("root", ids)


def test_blocks_come_back_as_they_were_in_parts_too() -> None:
    cache, other = pool(), pool()
    cached(cache, TEXT[:400])
    blocks = saved(cache)
    assert [each.name.depth for each in blocks] == [1, 2, 3, 4, 5, 6], "a block comes before the one that follows it"
    assert HostCopies(other).restore("root", TEXT[:400], blocks[:2])
    assert found(other, TEXT[:400]) == 128
    assert HostCopies(other).restore("root", TEXT[:400], blocks[2:])
    assert found(other, TEXT[:400]) == 384
    again = saved(other)
    for one, two in zip(blocks, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.arrays, two.arrays, strict=True))
    assert other.bytes_used == 0


def test_a_gap_before_the_blocks_restores_nothing() -> None:
    cache, other = pool(), pool()
    cached(cache, TEXT[:400])
    assert not HostCopies(other).restore("root", TEXT[:400], saved(cache)[1:])
    assert (found(other, TEXT[:400]), other.bytes_cached) == (0, 0)


def test_a_pool_without_room_restores_nothing_and_takes_nothing_from_rows() -> None:
    cache, other = pool(), pool(8)
    cached(cache, TEXT[:400])
    row, blocks = other.open(300), saved(cache)
    assert row is not None
    assert not HostCopies(other).restore("root", TEXT[:400], blocks)
    assert list(other.rows) == [row]
    assert found(other, TEXT[:400]) == 0
    other.close(row)
    assert HostCopies(other).restore("root", TEXT[:400], blocks)
    assert found(other, TEXT[:400]) == 384


def test_places_that_a_window_gave_up_are_filled_again() -> None:
    cache = pool()
    cached(cache, TEXT[:400])
    blocks = saved(cache)
    cache.evict(cache.groups[1], 4)
    assert found(cache, TEXT[:400]) < 384
    assert HostCopies(cache).restore("root", TEXT[:400], blocks)
    assert found(cache, TEXT[:400]) == 384


def test_a_state_comes_back_as_it_was_without_the_rows_beside_it() -> None:
    specs = [RecurrentSpec(((2, 3), (5,)), (mx.bfloat16, mx.float32)), RecurrentSpec(((4,),), (mx.float16,))]
    one, other = StateArena(specs), StateArena(specs)
    batch = [[mx.random.normal((3, 2, 3)).astype(mx.bfloat16), mx.random.normal((3, 5))], [mx.ones((3, 4), mx.float16)]]
    for arena in one, other:
        arena.resize(4)
    one.write([2, 0, 3], StateBatch(3, batch))
    other.from_host(1, one.to_host(0))
    assert len(one.batches([2, 0, None, 1])) == 1, "the last block holds nothing"
    assert other.batches([1]) == [], "its row is alone"
    got = other.read([1])
    assert got is not None
    for (arrays, wanted), spec in zip(zip(got.layers, batch, strict=True), specs, strict=True):
        assert tuple(array.dtype for array in arrays) == spec.dtypes
        assert all(mx.array_equal(array, all[1:2]) for array, all in zip(arrays, wanted, strict=True))


def test_a_file_that_cannot_be_removed_is_an_error(tmp_path, monkeypatch) -> None:
    kept, wanted = filled(tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(StorageError, match="remove the folder of --prefix-cache-dir"):
        kept.clear().result()
    monkeypatch.undo()
    kept.clear().result()
    assert (list(tmp_path.iterdir()), read(kept, wanted)) == ([], [])
