"""Simulates comparisons of two versions of an adapter, and counts how often they end wrongly.

    python benchmarks/studies/competition.py [--runs 200] [--out benchmarks/results/competition.json]

No model runs: the versions and the rewards are simulated, and everything between them is the server's own code, with
its default settings. Each request is assigned by its user, rewarded, and looked at at once. It takes ten minutes. The
figures depend on chance, but not on the machine. Half of the live version's answers are good, and of the candidate's:

    scorer, 0 or 1     0.6 (better), 0.4 (worse), 0.5 (equal), and 0.53, which is below smallest_effect
    thumbs             0.65, 0.35 or 0.5, judged by people whose thumbs are right 80 % of the time
    graded, drifting   0.6, 0.4 or 0.5; rewards between 0 and 1 that rise and fall for both versions meanwhile

Then thumbs at shares from 0.1 to 0.9, of which the server takes those up to 0.5. Either half of the live version's
answers are good throughout; or their part rises from 0.1 to 0.9, or falls so, over the 2,000 rewards that the candidate
may get. The candidate is as good, or better or worse by 0.1. These are computed together (see `lib/comparisons.py`).
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.lib import comparisons
from benchmarks.lib.figures import Figure, reported, spread
from benchmarks.lib.machine import describe
from benchmarks.lib.report import RESULTS, setting, show, write
from mlx_parallm.config import CompetitionConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import CollectionSpec, FinishReason
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.extras.competition.comparison import ComparisonSpec
from mlx_parallm.extras.competition.service import CompetitionService
from mlx_parallm.rl.trajectories import TrajectoryGroup, TrajectoryState

LIVE, CANDIDATE = AdapterRef("default", 1), AdapterRef("default", 2)
USERS = 5000
EVER = math.inf
MOST_ERRORS = 0.05
NORMAL_95 = 1.96

Rewards = Callable[[random.Random, int, float], float]
"""(random numbers, number of the request, quality of the version) → the reward of its answer."""


def scored(dice: random.Random, _number: int, quality: float) -> float:
    return float(dice.random() < quality)


def thumbs(dice: random.Random, _number: int, quality: float) -> float:
    good, right = dice.random() < quality, dice.random() < 0.8
    return 1.0 if good == right else -1.0


def graded(dice: random.Random, number: int, quality: float) -> float:
    tide = 0.2 * math.sin(number / 300)
    return dice.betavariate(2.0, 2.0) * 0.6 + 0.4 * (quality + tide)


LIVE_QUALITY = 0.5
REWARDS: dict[str, tuple[Rewards, dict[str, float]]] = {
    "scorer, 0 or 1": (scored, {"better": 0.6, "worse": 0.4, "equal": 0.5, "slightly better": 0.53}),
    "thumbs": (thumbs, {"better": 0.65, "worse": 0.35, "equal": 0.5}),
    "graded, drifting": (graded, {"better": 0.6, "worse": 0.4, "equal": 0.5}),
}
"""Each kind of reward, with the qualities of its candidates."""
RIGHT_ENDS = {"better": "promoted", "worse": "withdrawn", "equal": "no_difference"}
"""How the comparison of such a candidate should end. For one that is slightly better there is no wrong end."""


SHARES = tuple(number / 10 for number in range(1, 10))
DRIFTS = {"steady": 0.0, "rising": 0.8, "falling": -0.8}
"""By how much more of both versions' answers are good at the end than at the start."""
CHECKED = 2
DIFFERENCES = {"better": 0.1, "worse": -0.1, "equal": 0.0}


class FakeVersions:
    """Versions without weights; `choose` is what requests get while they are compared. `leases`: held now."""

    def __init__(self) -> None:
        self.choose: Callable[[str], AdapterRef] | None = None
        self.leases = 0

    @contextmanager
    def lease(self, selector: str) -> Iterator[AdapterRef]:
        self.leases += 1
        try:
            yield LIVE
        finally:
            self.leases -= 1

    def split(self, name: str, choose: Callable[[str], AdapterRef] | None) -> None:
        self.choose = choose

    async def stage(self, ref: AdapterRef) -> None:
        pass


class FakeTraining:
    """An adapter whose two versions are in checkpoints."""

    name = LIVE.name

    def __init__(self) -> None:
        self.live = LIVE
        self.held = False

    def hold(self) -> None:
        self.held = True

    async def settled(self) -> None:
        pass

    def release(self) -> None:
        self.held = False

    def pause(self, reason: str) -> None:
        raise AssertionError(reason)

    def version(self, selector: str) -> AdapterRef:
        return CANDIDATE

    def is_saved(self, ref: AdapterRef) -> bool:
        return True

    def came_from(self, ref: AdapterRef) -> bool:
        return False

    async def keep(self, ref: AdapterRef) -> None:
        pass

    def incumbent(self) -> AdapterRef | None:
        return None

    async def make_live(self, ref: AdapterRef) -> None:
        self.live = ref


@dataclass(frozen=True, slots=True)
class Ended:
    """How one comparison ended, after how many requests, and whether a z-test of 5 % would have ended it earlier."""

    verdict: str
    requests: int
    peeked: bool


async def run(rewards: Rewards, quality: float, seed: int) -> Ended:
    """One comparison, from its start to its end."""
    dice, versions, training = random.Random(seed), FakeVersions(), FakeTraining()
    tasks: list[asyncio.Task[None]] = []

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.get_running_loop().create_task(work))

    service = CompetitionService(CompetitionConfig(), lambda _: training, versions, lambda kind, **data: None, spawn)
    await service.start(None, ComparisonSpec("default@2"))
    qualities, peeking, number = {LIVE: LIVE_QUALITY, CANDIDATE: quality}, Peeking(), 0
    while versions.choose is not None:
        number += 1
        version = versions.choose(f"user {dice.randrange(USERS)}")
        reward = rewards(dice, number, qualities[version])
        peeking.add(reward, version == CANDIDATE)
        service.observe(_group(version, reward))
        if tasks:
            await tasks.pop()
    (card,) = service.cards()
    assert training.live == (CANDIDATE if card.verdict == "promoted" else LIVE)
    assert (versions.leases, training.held) == (0, False)
    service.check_integrity()
    return Ended(card.verdict, number, peeking.would_have_ended)


def _group(version: AdapterRef, reward: float) -> TrajectoryGroup:
    ids, collection = (1,), CollectionSpec("exact")
    answer = Trajectory("t", "g", 1, version, ids, ids, (0.0,), 1.0, "", FinishReason.STOP, collection, EVER)
    group = TrajectoryGroup(version.name, [answer])
    group.members[0].own_reward, group.members[0].state = reward, TrajectoryState.SCORED
    return group


class Peeking:
    """What goes wrong without a sequential test: a z-test of two means at 5 %, read after every reward from the 30th of
    each version on, whose first significant result is believed."""

    def __init__(self) -> None:
        self.would_have_ended = False
        self._sums = {False: [0.0, 0.0, 0.0], True: [0.0, 0.0, 0.0]}

    def add(self, reward: float, candidate: bool) -> None:
        of_version = self._sums[candidate]
        for power in range(3):
            of_version[power] += reward**power
        if self.would_have_ended or min(sums[0] for sums in self._sums.values()) < 30:
            return
        means = {which: sums[1] / sums[0] for which, sums in self._sums.items()}
        variance = sum((sums[2] / sums[0] - means[which] ** 2) / sums[0] for which, sums in self._sums.items())
        self.would_have_ended = abs(means[True] - means[False]) > NORMAL_95 * math.sqrt(variance)


def at_shares(runs: int) -> dict[tuple[float, str, str], list[Ended]]:
    """The ends of all runs, by share, drift and candidate. The server's own code makes the first two of each too, which
    must end alike."""
    found = {}
    for share in SHARES:
        settings = CompetitionConfig().model_copy(update={"share": share})
        for drift in DRIFTS:
            for which, difference in DIFFERENCES.items():
                requests = comparisons.thumbs(share, DRIFTS[drift], difference, runs, settings)
                ended = [*zip(*comparisons.ends(requests, settings), strict=True)]
                assert ended[:CHECKED] == [*comparisons.ends_of_the_server(requests, settings, min(runs, CHECKED))]
                found[share, drift, which] = [Ended(verdict, number, False) for verdict, number in ended]
    return found


def share_figures(found: dict[tuple[float, str, str], list[Ended]]) -> Iterator[Figure]:
    """Wrong verdicts, of which there may be a few more than the error rate by chance, and differences that are found
    within the budget: at a share of 0.9 the live version has only 222 rewards by then."""
    for (share, drift, which), ends in found.items():
        runs = len(ends)
        most = MOST_ERRORS + NORMAL_95 * math.sqrt(MOST_ERRORS * (1 - MOST_ERRORS) / runs)
        what = f"share {share}, {drift}, {which} candidate"
        verdicts = Counter(end.verdict for end in ends)
        wrong = (verdicts["promoted"] * (which != "better") + verdicts["withdrawn"] * (which != "worse")) / runs
        yield Figure(f"wrong verdicts, {what}", "", *reported([wrong]), most)
        if which != "equal":
            yield Figure(f"found, {what}", "", *reported([verdicts[RIGHT_ENDS[which]] / runs]))


def share_table(found: dict[tuple[float, str, str], list[Ended]]) -> Table:
    made = Table("share", "rewards", title="Comparisons by thumbs, at other shares")
    for which in DIFFERENCES:
        made.add_column(f"{which}: promoted, withdrawn", justify="right")
        made.add_column("requests", justify="right")
    for share in SHARES:
        for drift in DRIFTS:
            cells = [cell for which in DIFFERENCES for cell in _cells(found[share, drift, which])]
            made.add_row(f"{share}", drift, *cells)
    return made


def _cells(ends: list[Ended]) -> tuple[str, str]:
    verdicts = Counter(end.verdict for end in ends)
    requests = statistics.median(end.requests for end in ends)
    return f"{verdicts['promoted']}, {verdicts['withdrawn']}", f"{requests:,.0f}"


async def simulate(runs: int) -> dict[str, dict[str, list[Ended]]]:
    """The ends of all runs, by kind of reward and of candidate."""
    return {
        kind: {
            which: [await run(rewards, quality, seed) for seed in range(runs)] for which, quality in qualities.items()
        }
        for kind, (rewards, qualities) in REWARDS.items()
    }


def figures(results: dict[str, dict[str, list[Ended]]]) -> Iterator[Figure]:
    for kind, by_candidate in results.items():
        for which, ends in by_candidate.items():
            if which in RIGHT_ENDS:
                wrong = statistics.fmean(end.verdict != RIGHT_ENDS[which] for end in ends)
                yield Figure(f"wrong ends, {which} candidate, {kind}", "", *reported([wrong]), MOST_ERRORS)
            else:
                promoted = statistics.fmean(end.verdict == "promoted" for end in ends)
                yield Figure(f"promoted, {which} candidate, {kind}", "", *reported([promoted]))
            requests = spread([float(end.requests) for end in ends])
            yield Figure(f"requests until the end, {which} candidate, {kind}", "", requests, requests.median)
        peeked = statistics.fmean(end.peeked for end in by_candidate["equal"])
        name = f"equal candidates that a z-test read after every reward calls different, {kind}"
        yield Figure(name, "", *reported([peeked]))


def table(results: dict[str, dict[str, list[Ended]]]) -> Table:
    made = Table("rewards", "candidate", title="How comparisons ended")
    for header in ("promoted", "withdrawn", "no difference", "requests, median", "95 %"):
        made.add_column(header, justify="right")
    for kind, by_candidate in results.items():
        for which, ends in by_candidate.items():
            verdicts = Counter(end.verdict for end in ends)
            counts = (str(verdicts[verdict]) for verdict in ("promoted", "withdrawn", "no_difference"))
            requests = sorted(end.requests for end in ends)
            made.add_row(
                kind,
                which,
                *counts,
                f"{statistics.median(requests):,.0f}",
                f"{requests[math.ceil(0.95 * len(requests)) - 1]:,}",
            )
    return made


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="Comparisons for each line of the first table.")
    parser.add_argument("--runs-a-share", type=int, default=200, help="Comparisons for each cell of the second one.")
    parser.add_argument("--out", type=Path, default=RESULTS / "competition.json")
    arguments = parser.parse_args()
    machine = describe()
    results, shares = asyncio.run(simulate(arguments.runs)), at_shares(arguments.runs_a_share)
    judged = [*figures(results), *share_figures(shares)]
    show(judged, table(results), share_table(shares))
    runs: dict[str, dict[str, object]] = {
        f"{which}, {kind}": {"verdicts": Counter(end.verdict for end in ends), "requests": [e.requests for e in ends]}
        for kind, found in results.items()
        for which, ends in found.items()
    }
    runs |= {
        f"share {share}, {drift}, {which}": {
            "verdicts": Counter(end.verdict for end in ends),
            "requests": statistics.median(end.requests for end in ends),
        }
        for (share, drift, which), ends in shares.items()
    }
    write(arguments.out, {"machine": machine, "setting": setting(arguments), "runs": runs}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


if __name__ == "__main__":
    sys.exit(main())
