"""The driver that needs no package: `python -m fuzz TARGET... --found FOLDER [--seconds 60] [--seed 1]`.

It runs the inputs that are kept and, for so many seconds of each target, random changes of them. The first input that
fails is written to the folder, and its error raised.
"""

import argparse
import time
from pathlib import Path

from fuzz.driving import Runner, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    arguments = parser.parse_args()
    for name in arguments.targets:
        runner = Runner(load(name), arguments.found)
        inputs = [path.read_bytes() for path in runner.target.corpus()]
        for data in inputs:
            runner(data)
        kept = runner.count
        runner.mutate(inputs, arguments.seconds, arguments.seed)
        print(f"{name}: {kept} kept inputs and {runner.count - kept} new ones, the slowest {runner.slowest_s:.3f} s")


main()
