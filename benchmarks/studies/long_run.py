"""Times the start of a server whose run has made very many updates.

    python benchmarks/studies/long_run.py [--updates 100000] [--repeats 3] [--out benchmarks/results/long_run.json]

The journal is filled by the server's own code: four answers of 32 tokens with their rewards for each update, and the
update. Then a server makes updates of its own on that run, saves checkpoints, and is killed; the next one makes those
after its last checkpoint again. Its start is compared with that of a server on a run with nothing but these updates,
one after the other. A start ends with the first answer. Then what checkpoints cover is removed from the journal, which
keeps the newest 1,000 updates, and the starts are compared again. The model is a small random one. It takes fifteen
minutes, most of them to fill the journal.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.lib import machine
from benchmarks.lib.durability.kills import serve
from benchmarks.lib.durability.processes import end, get, install, post, small_model
from benchmarks.lib.figures import Figure, percentile, reported, spread
from benchmarks.lib.report import RESULTS, setting, show, write
from mlx_parallm.adapters.runs import JOURNAL
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.runs.compaction import compaction
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Closed, PolicyChange, Score, Start, TrainedEpisode, TrainedGroup, Update
from mlx_parallm.rl.runs.store import JournalFile

LONGER_S = 5.0
"""Longest time that a start after 100,000 updates may take longer than one after a few."""

STEP_MS = 50.0
"""99th percentile of the time that a step of the compaction takes, for which commits wait."""

KEEP = 1000

MEMBERS, TOKENS, AT_ONCE = 4, 32, 500
MADE = 8
"""Updates that the server makes itself; the last checkpoint has five of them."""

GIVEN = [
    {"prompt_token_ids": [5, 6], "completion_token_ids": [token, 2], "reward": reward, "group_id": "a"}
    for token, reward in ((8, 1), (9, 0))
]


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "long_run.json")
    arguments = parser.parse_args()
    described = machine.describe()
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary)
        install(site)
        os.environ["MLX_PARALLM_MODEL__BASE_MODEL_PATH"] = str(small_model(site / "model"))
        runs = {name: site / name for name in ("short", "long")}
        for name, run in runs.items():
            begin(run, site, arguments.updates if name == "long" else 0)
        journal = runs["long"] / "kept" / JOURNAL
        whole = Starts(runs, site, arguments.repeats)
        size_mb = journal.stat().st_size / 1e6
        steps_s = compacted(journal)
        small = Starts(runs, site, arguments.repeats)
        small_mb = journal.stat().st_size / 1e6
    steps_ms = [1000 * each for each in steps_s]
    figures = [
        Figure("start after a few updates", "s", *reported(whole.took_s["short"])),
        *whole.figures(f"{arguments.updates:,} updates, all of them in the journal"),
        Figure("journal", "MB", *reported([size_mb])),
        Figure("removing what checkpoints cover", "s", *reported([sum(steps_s)])),
        Figure(f"a step of it, of {len(steps_s):,}", "ms", spread(steps_ms), percentile(steps_ms, 99), STEP_MS),
        *small.figures(f"{arguments.updates:,} updates, the newest {KEEP:,} in the journal"),
        Figure("journal", "MB", *reported([small_mb])),
    ]
    show(figures)
    starts = {"whole": whole.took_s, "compacted": small.took_s}
    reads = {"whole": whole.reads_s, "compacted": small.reads_s}
    write(
        arguments.out,
        {"machine": described, "setting": setting(arguments), "starts_s": starts, "reads_s": reads},
        figures,
    )
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


class Starts:
    """Starts of servers on the short and the long run, one after the other, and what each reads of its journal."""

    def __init__(self, runs: Mapping[str, Path], site: Path, repeats: int) -> None:
        self.took_s: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                self.took_s[name].append(started(run, site))
        self.reads_s = {name: [reading(run / "kept" / JOURNAL) for _ in range(repeats)] for name, run in runs.items()}

    def figures(self, what: str) -> list[Figure]:
        longer = spread(ours - theirs for ours, theirs in zip(self.took_s["long"], self.took_s["short"], strict=True))
        return [
            Figure(f"start after {what}", "s", *reported(self.took_s["long"])),
            Figure("longer than after a few", "s", longer, longer.median, LONGER_S),
            Figure("CPU time of what it reads of the journal", "s", *reported(self.reads_s["long"]), LONGER_S),
        ]


def compacted(path: Path) -> list[float]:
    """Removes what the run's checkpoint covers. Returns the seconds that each step took."""
    file, took_s = JournalFile(path), []
    steps = compaction(file, "default", file.newest_changes(1)[0].number - KEEP, KEEP)
    began = time.monotonic()
    for _ in steps:
        took_s.append(time.monotonic() - began)
        began = time.monotonic()
    file.close()
    return took_s


def begin(run: Path, site: Path, updates: int) -> None:
    """A run whose journal has so many updates from before training began again, and those that a server has made."""
    run.mkdir()
    process, base = serve(run, site)
    post(f"{base}/completions", {"prompt": "a", "max_tokens": 2, "collect_trajectory": True})
    end(process, signal.SIGTERM, 0.0)
    if updates:
        asyncio.run(fill(run / "kept" / JOURNAL, updates))
    process, base = serve(run, site)
    for _ in range(MADE):
        post(f"{base}/training/update", {"trajectories": GIVEN})
    end(process, signal.SIGKILL, 0.0)


async def fill(path: Path, updates: int) -> None:
    """Writes the updates into the journal of a run that has made none."""
    journal, began = Journal(JournalFile(path)), time.monotonic()
    await journal.changed(PolicyChange("default", 1, 0.0, Start()))
    for first in range(1, updates + 1, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, updates + 1))
        for answers in map(group, numbers):
            scores = [Score(one.trajectory_id, float(at % 2)) for at, one in enumerate(answers)]
            journal.added("default", answers, [*scores, Closed(answers[0].group_id)])
        for number in numbers:
            journal.started(PolicyChange("default", number + 1, float(number), update(number)))
        await journal.flush()
        if numbers[-1] % 10_000 == 0:
            print(f"{numbers[-1]:,} updates in {time.monotonic() - began:.0f} s", flush=True)
    await journal.changed(PolicyChange("default", updates + 2, float(updates), Start()))
    await journal.close()


def group(number: int) -> tuple[Trajectory, ...]:
    return tuple(
        replace(TEMPLATES[at], trajectory_id=f"made-{number}-{at}", group_id=f"made-{number}") for at in range(MEMBERS)
    )


def templates() -> Iterator[Trajectory]:
    dice, version = random.Random(0), AdapterRef("default", 1)
    for _ in range(MEMBERS):
        ids, logprobs = (
            tuple(dice.randrange(40_000) for _ in range(TOKENS)),
            tuple(-dice.random() for _ in range(TOKENS)),
        )
        spec = CollectionSpec("exact", {"answer": "4"})
        yield Trajectory(
            "", "", MEMBERS, version, ids[:9], ids, logprobs, 1.0, "word " * TOKENS, FinishReason.STOP, spec, 0.0
        )


TEMPLATES = tuple(templates())
METRICS = {f"metric_{number}": 1 / (number + 3) for number in range(25)}


def update(number: int) -> Update:
    episodes = tuple(TrainedEpisode((f"made-{number}-{at}",)) for at in range(MEMBERS))
    trained = TrainedGroup(episodes, tuple(float(at % 2) for at in range(MEMBERS)), "exact", 0, True)
    progress = {"run_steps": float(number), "run_tasks": float(number)}
    return Update((trained,), MEMBERS, True, number, "published", number, METRICS, progress, all_progress=True)


def reading(path: Path) -> float:
    """CPU seconds of what a start reads, which other programs on the machine do not change."""
    began = time.process_time()
    file = JournalFile(path)
    last = file.newest_changes(1)[0].number
    file.changes_since("default", last)
    file.progress("default")
    file.waiting("default")
    file.newest_groups("rollout-", 1000)
    file.close()
    return time.process_time() - began


def started(run: Path, site: Path) -> float:
    """Seconds until a server answers that continues the run. It is killed."""
    began = time.monotonic()
    process, base = serve(run, site)
    took = time.monotonic() - began
    step = get(f"{base}/training/status")["step"]
    end(process, signal.SIGKILL, 0.0)
    if step != MADE:
        raise SystemExit(f"the server in {run} is at step {step}, and {MADE} updates were made")
    return took


if __name__ == "__main__":
    sys.exit(main())
