"""What the threads of the BLAS cost on a Linux CPU: the bundled model on a quiet machine and beside other programs.

    python benchmarks/studies/busy.py [--settings shipped spinning timeout=10 threads=1 …] [--burners 0 8] [--repeats 3]
        [--mkl FILE] [--out FILE]

A setting is `shipped` (idle threads sleep after 2**24 cycles, and their number follows what other programs leave),
`spinning` (OpenBLAS as it comes: idle threads wait actively for 2**26 cycles), or of these, with commas: `timeout=N`
(OPENBLAS_THREAD_TIMEOUT: 2**N cycles), `threads=N`, `mkl` (the library that --mkl names; its folder must be in
LD_LIBRARY_PATH), `kmp=N` (KMP_BLOCKTIME of MKL).

Each setting has a process of its own, which loads the model once. In each repeat all of them measure in turn, for
milliseconds: a prompt of 256 tokens, a decode step of 1, 8 and 32 sequences, and a product of 1024x576x1536. Beside
`--burners` processes that burn a core each. Some 3 minutes without these; beside 8, `spinning` alone takes ten.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.burning import burning
from benchmarks.lib.figures import spread

PARTS = ("prompt", "decode 1", "decode 8", "decode 32", "product")
SETTINGS = ("shipped", "spinning", "timeout=20", "timeout=10", "timeout=4", "threads=1")


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        _measure_when_asked(follow=arguments.child == "shipped")
        return
    machine.warn_if_busy()
    record = {"machine": machine.describe(), "setting": report.setting(arguments), "ms": {}}
    children = {name: _start(name, arguments.mkl) for name in arguments.settings}
    try:
        for child in children.values():
            child.stdout.readline()
        for burners in arguments.burners:
            with burning(burners):
                taken = record["ms"][str(burners)] = _rounds(children, arguments.repeats)
            report.console().print(_table(burners, taken))
    finally:
        for child in children.values():
            child.kill()
    if arguments.out:
        report.write(arguments.out, record, [])


def _rounds(children: dict[str, subprocess.Popen[str]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by setting and part, one for each repeat."""
    taken: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in children}
    for repeat in range(repeats):
        for name in children if repeat % 2 == 0 else reversed(children):
            child = children[name]
            child.stdin.write("\n")
            child.stdin.flush()
            found = json.loads(child.stdout.readline())
            print(f"  {name}: " + ", ".join(f"{part} {found[part]:.0f} ms" for part in PARTS), flush=True)
            for part in PARTS:
                taken[name][part].append(found[part])
    return taken


def _start(setting: str, mkl: str | None) -> "subprocess.Popen[str]":
    prefixes = ("OPENBLAS_", "MKL_", "OMP_", "KMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    for part in setting.split(","):
        name, _, value = part.partition("=")
        environment |= {
            "shipped": {},
            "spinning": {"OPENBLAS_THREAD_TIMEOUT": "26"},
            "timeout": {"OPENBLAS_THREAD_TIMEOUT": value},
            "threads": {"OPENBLAS_NUM_THREADS": value, "MKL_NUM_THREADS": value},
            "mkl": {"MLX_PARALLM_BLAS": mkl or ""},
            "kmp": {"KMP_BLOCKTIME": value},
        }[name]
    command = [sys.executable, __file__, "--child", setting]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _measure_when_asked(follow: bool) -> None:
    """Measures once for each line of stdin, and writes one line of JSON. `follow`: as a server does."""
    import mlx_parallm  # before mlx.core: it chooses the BLAS

    import mlx.core as mx  # isort: skip
    from benchmarks.lib.step.decode import Decoder, Rows
    from mlx_parallm.app.device import build_runner
    from mlx_parallm.config import Config
    from mlx_parallm.machine.processors import BlasThreads
    from mlx_parallm.model.manager import SharedModelManager

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    assert mlx_parallm.BLAS.fast, mlx_parallm.BLAS.problem
    manager = SharedModelManager(progress=False)
    runner = build_runner(manager, manager.install_bank(2, 16), Config())
    one, eight, many = (Decoder(runner, Rows.of([64] * rows), room=1000) for rows in (1, 8, 32))
    prompt = mx.arange(256)[None]
    left, right = mx.random.normal((1024, 576)), mx.random.normal((576, 1536))
    mx.eval(left, right)
    threads = BlasThreads()

    def measure() -> dict[str, float]:
        if follow:
            threads.adapt()  # by what others did while this process waited for its turn
            threads.adapt()  # by what they do now
        return {
            "prompt": _milliseconds(lambda: mx.eval(manager.model(prompt)[:, -1]), 1),
            "decode 1": _milliseconds(lambda: mx.eval(one.step()), 6),
            "decode 8": _milliseconds(lambda: mx.eval(eight.step()), 4),
            "decode 32": _milliseconds(lambda: mx.eval(many.step()), 4),
            "product": _milliseconds(lambda: mx.eval(left @ right), 6),
        }

    measure()
    print("ready", file=replies, flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), file=replies, flush=True)


def _milliseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return 1e3 * (time.perf_counter() - started) / repeats


def _table(burners: int, taken: dict[str, dict[str, list[float]]]) -> Table:
    table = Table("setting", title=f"ms, beside {burners} burning processes: median (least–most)")
    for part in PARTS:
        table.add_column(part, justify="right")
    for name, parts in taken.items():
        table.add_row(name, *(spread(parts[part]).text() for part in PARTS))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--burners", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mkl", help="libmkl_rt.so, for the settings with `mkl`")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
