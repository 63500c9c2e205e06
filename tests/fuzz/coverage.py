"""The driver that looks for inputs which reach new branches: `python -m fuzz.coverage TARGET OPTIONS FOLDERS`.

It needs the package `atheris`, which has no wheels for every platform. Options and folders are libFuzzer's
(https://llvm.org/docs/LibFuzzer.html#options).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random

import atheris
from fuzz.driving import Runner, load

WATCHED = ("mlx_parallm", "tarfile", "h11", "jinja2")
"""Packages whose branches count: ours, and those that read the same inputs."""


def main(name: str, options: list[str]) -> None:
    with atheris.instrument_imports(include=list(WATCHED)):
        target = load(name)
    found = Path(os.environ["FUZZ_FOUND"])
    runner, report = Runner(target, found), found.with_name("report.json")
    written = dict[str, float]()

    def one(data: bytes) -> None:
        runner(data)
        figures = {"slowest_s": round(runner.slowest_s, 3), "peak_mb": runner.peak >> 20}
        if figures != written:
            written.update(figures)
            report.write_text(json.dumps(figures))

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        return target.mutated(data, rng)[:most] if rng.randrange(4) else atheris.Mutate(data, most)

    again = f"{sys.executable} -m fuzz.coverage {name}"  # with -merge, libFuzzer starts itself by this line
    atheris.Setup([again, *options], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
