"""The driver that needs no package: `python -m fuzz TARGET... --found FOLDER [--count 100] [--seconds 60] [--seed 1]
[--limit 2]`.

It runs the inputs that are kept, and random changes of them: so many for each target, and more until it has taken so
many seconds. `--limit`: processor seconds of one input. The first that fails is written to the folder, and its error
raised.
"""

import argparse
import time
from pathlib import Path

from fuzz.driving import CPU_LIMIT_S, Runner, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--found", type=Path, required=True)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    parser.add_argument("--limit", type=float, default=CPU_LIMIT_S)
    arguments = parser.parse_args()
    for name in arguments.targets:
        runner = Runner(load(name), arguments.found, arguments.limit)
        inputs = [path.read_bytes() for path in runner.target.corpus()]
        for data in inputs:
            runner(data)
        kept = runner.count
        changes = runner.target.changes(inputs, arguments.seed)
        ends = time.monotonic() + arguments.seconds
        while runner.count < kept + arguments.count or time.monotonic() < ends:
            runner(next(changes))
        print(f"{name}: {kept} kept inputs and {runner.count - kept} new ones, the slowest {runner.slowest_s:.3f} s")


main()
