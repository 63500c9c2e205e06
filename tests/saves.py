"""Small checkpoints for tests, and savers that are killed: `from saves import manager, weights`.

As a script, `saves.py <template> <results>`: children save a checkpoint, child k until its k-th call to the
filesystem, before which it is killed; each in a copy of `template`, left in `results/<k>`. The last child lives to the
end. The script imports no MLX and has one thread, so that it can fork.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.checkpoints import CheckpointStore, LoadedCheckpoint
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights, LinearSpec, LoRAPair
from mlx_parallm.core.adapters import AdapterRef

NAME = "math"
BASE = "0123456789abcdef0123456789abcdef"
Q_PROJ = "model.layers.0.self_attn.q_proj"
V_PROJ = "model.layers.0.self_attn.v_proj"
LAYOUT = AdapterLayout(
    {path: LinearSpec(path, 8, out, "model.layers.0.self_attn") for path, out in ((Q_PROJ, 8), (V_PROJ, 4))}, {}, 1
)
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def ref(version: int, name: str = NAME) -> AdapterRef:
    return AdapterRef(name, version)


def weights(seed: int, rank: int = 2) -> AdapterWeights:
    draw = np.random.default_rng(seed).standard_normal
    pairs = {
        path: LoRAPair(draw(linear.a_shape(rank), dtype=np.float32), draw(linear.b_shape(rank), dtype=np.float32), 2.0)
        for path, linear in LAYOUT.linears.items()
    }
    return AdapterWeights(pairs)


def assert_holds(loaded: LoadedCheckpoint, seed: int) -> None:
    expected = weights(seed)
    assert loaded.weights.pairs.keys() == expected.pairs.keys()
    for path, pair in loaded.weights.pairs.items():
        np.testing.assert_array_equal(pair.a, expected.pairs[path].a)
        np.testing.assert_array_equal(pair.b, expected.pairs[path].b)
        assert pair.scale == expected.pairs[path].scale


def names(cards: tuple[CheckpointCard, ...]) -> list[str]:
    return [card.name for card in cards]


def hidden(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]


def manager(folder: Path, keep: int = 10, base: str = BASE) -> CheckpointStore:
    return CheckpointStore(folder, LAYOUT, base, max_rank=8, keep=keep)


def write_optimizer(folder: Path) -> None:
    (folder / "optimizer.bin").write_bytes(b"state" * 100)


def one_checkpoint(folder: Path) -> CheckpointStore:
    checkpoints = manager(folder)
    checkpoints.save_checkpoint(ref(1), weights(1), metrics={"reward": 0.5}, extra=write_optimizer)
    return checkpoints


def template(folder: Path) -> None:
    """Two checkpoints, of which a third save with `keep=2` prunes the first."""
    for version in (1, 2):
        manager(folder).save_checkpoint(ref(version), weights(version), tags=["best"] * (version == 2))


def third_save(folder: Path) -> CheckpointCard:
    return manager(folder, keep=2).save_checkpoint(ref(3), weights(3), tags=["best"], extra=write_optimizer)


def _die_before_call(number: int) -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, _arguments: tuple[object, ...]) -> None:
        if event in _EVENTS:
            count()

    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        count()
        fsync(descriptor)

    os.fsync = counted_fsync
    sys.addaudithook(hook)


def _child(folder: Path, number: int) -> None:
    _die_before_call(number)
    try:
        third_save(folder)
    except BaseException as error:  # noqa: BLE001 - a child must never run its parent's code
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def main(source: Path, results: Path) -> None:
    assert not any(name.split(".")[0] in ("mlx", "mlx_lm") for name in sys.modules)
    status = -signal.SIGKILL
    number = 0
    while status == -signal.SIGKILL:
        number += 1
        folder = results / str(number)
        shutil.copytree(source, folder)
        child = os.fork()
        if child == 0:
            _child(folder, number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
