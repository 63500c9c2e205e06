"""CompetitionService: compares two versions of an adapter on live requests, and keeps the better one live.

start, or an update ─▶ the name is split ─▶ rewards of both versions ─▶ verdict ─▶ one of them is live for all

While versions are compared, the adapter is not updated, so that both stay what they are. After a restart, an automatic
comparison begins again, with the hours that are left, because its candidate is the version that training continues
from. Any other ends with the process, and the live version stays.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_parallm.config import CompetitionConfig
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.errors import ConflictError, InvalidRequestError
from mlx_parallm.extras.competition.compared import ComparedAdapter
from mlx_parallm.extras.competition.comparison import (
    NOT_FINITE,
    OUT_OF_TIME,
    ComparisonCard,
    ComparisonEnd,
    ComparisonSpec,
    LiveComparison,
)
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.trajectories import TrajectoryGroup

if TYPE_CHECKING:
    from mlx_parallm.adapters.service import AdapterService
    from mlx_parallm.rl.service import TrainingService

_log = logging.getLogger(__name__)

_LOOK_S = 60.0
"""The wall clock is read this often, because a timer stands still while the machine sleeps."""


@dataclass(eq=False, slots=True)
class _Running:
    """A comparison that runs, and what it holds. `until`: when its hours have passed, in Unix time; `timer` looks.
    `outcome`: set when it is ending."""

    comparison: LiveComparison
    trained: ComparedAdapter
    leases: ExitStack
    until: float
    timer: asyncio.TimerHandle = field(init=False)
    outcome: ComparisonEnd | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class CompetitionService:
    """Event loop's thread only. One comparison of an adapter runs at a time. `adapter` None is the default one.

    Args:
        trained: the adapter of this name, None: the default one. Raises UnknownModelError if it is not trained, or not
            seen by the reader.
        spawn: runs a coroutine as a task that the owner cancels when it closes.
    """

    def __init__(
        self,
        config: CompetitionConfig,
        trained: Callable[[str | None, Reader], ComparedAdapter],
        versions: AdapterService,
        emit: Emit,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._config = config
        self._trained = trained
        self._versions = versions
        self._emit = emit
        self._spawn = spawn
        self._running: dict[str, _Running] = {}
        self._starting: set[str] = set()
        self._last: dict[str, ComparisonCard] = {}
        self._ended: defaultdict[str, Counter[str]] = defaultdict(Counter)

    # -- control ---------------------------------------------------------------------------------

    async def start(self, adapter: str | None, spec: ComparisonSpec, reader: Reader = EVERYTHING) -> ComparisonCard:
        """Begins to compare a version with the live one. Returns when the first request can get it.

        Raises:
            UnknownModelError: the adapter is not trained here or not seen by the reader, or it has no such version.
            InvalidRequestError: the candidate is a version of another adapter, or a number is out of range.
            ConflictError: another comparison of the adapter runs; no version of it is live; the candidate is live
                already, or has no checkpoint from which training could go on.
            AdapterUnavailableError: the candidate's weights cannot be read.
        """
        trained = self._trained(adapter, reader)
        self.check_idle(trained.name)
        settings = _settings(self._config, spec)
        self._starting.add(trained.name)
        try:
            trained.hold()
            await trained.settled()
            comparison = _comparison(trained, spec.candidate, settings)
            await self._versions.stage(comparison.candidate)
            self._begin(trained, comparison)
        except BaseException:  # a cancelled caller too: training would be held for ever
            trained.release()
            raise
        finally:
            self._starting.discard(trained.name)
        return comparison.card()

    async def stop(self, adapter: str | None, reader: Reader = EVERYTHING) -> ComparisonCard:
        """Ends a comparison without a winner.

        Raises:
            UnknownModelError: the adapter is not trained here, or the reader does not see it.
            ConflictError: none of the adapter runs.
        """
        name = self._trained(adapter, reader).name
        running = self._running.get(name)
        if running is None:
            raise ConflictError(f"No versions of {name!r} are being compared.", param="lora_adapter")
        self._end_soon(running, ComparisonEnd("stopped", "asked"))
        await running.gone.wait()
        return self._last[name]

    def check_idle(self, name: str) -> None:
        """Raises ConflictError while versions of the adapter are compared."""
        if name in self._running or name in self._starting:
            raise ConflictError(
                f"Versions of {name!r} are being compared; wait for the end, or POST /v1/training/compare/stop.",
                param="lora_adapter",
            )

    def cards(self, reader: Reader = EVERYTHING) -> Sequence[ComparisonCard]:
        """Of each adapter that the reader sees, the comparison that runs, or else the last one since the process
        started."""
        running = {name: running.comparison.card() for name, running in self._running.items()}
        return [card for name, card in {**self._last, **running}.items() if reader.sees(name)]

    def forget(self, adapter: str) -> None:
        """Forgets the last comparison of an adapter."""
        self._last.pop(adapter, None)

    def ended(self, adapter: str) -> dict[str, int]:
        """Comparisons of an adapter that have ended since the start of the process, by verdict."""
        return dict(self._ended[adapter])

    def close(self) -> None:
        """Ends all comparisons; the versions that are live stay so."""
        for running in tuple(self._running.values()):
            self._leave(running, ComparisonEnd("stopped", "the server ends"))

    # -- a version that an update makes ------------------------------------------------------------

    @asynccontextmanager
    async def entry(self, name: str) -> AsyncIterator[None]:
        """If comparisons are automatic, the version that an update in this block makes is compared with the one before,
        which answers all requests until the comparison begins. The first version of an adapter has no rival."""
        trained = self._trained(name, EVERYTHING)
        live = trained.live if self._config.automatic else None
        if live is None or name in self._running or name in self._starting:
            yield
            return
        try:
            await trained.keep(live)
        except Exception as error:  # noqa: BLE001 - without the checkpoint there would be no way back
            trained.pause(f"{live} could not be saved before its successor: {error}")
        with self._versions.lease(str(live)):
            self._versions.split(name, lambda key: live)
            try:
                yield
            finally:
                self._versions.split(name, None)
                candidate = trained.live
                made = candidate is not None and candidate != live and trained.came_from(live)
                if made and candidate is not None and name not in self._starting:
                    self._begin(trained, LiveComparison(live, candidate, self._config, automatic=True))

    def begin_again(self, name: str) -> None:
        """Begins an automatic comparison again that the end of a process has cut off, without its rewards. Its hours
        count from when its candidate was saved. Call this when the training of an adapter begins."""
        trained = self._trained(name, EVERYTHING)
        live = trained.live
        incumbent = trained.incumbent() if self._config.automatic else None
        if live is not None and incumbent is not None and incumbent != live and trained.came_from(incumbent):
            comparison = LiveComparison(incumbent, live, self._config, automatic=True)
            self._begin(trained, comparison, trained.first_saved(live))

    # -- trajectories and rewards ------------------------------------------------------------------

    def includes(self, version: AdapterRef) -> bool:
        """Whether this version is being compared, so that its trajectories are wanted however old it is."""
        running = self._running.get(version.name)
        return running is not None and running.comparison.includes(version)

    def drew(self, trajectories: Sequence[Trajectory]) -> None:
        """Takes the answers to one prompt. A candidate whose numbers are not finite is withdrawn."""
        for trajectory in trajectories:
            version = trajectory.adapter
            running = None if version is None else self._running.get(version.name)
            of_candidate = running is not None and version == running.comparison.candidate
            if running and of_candidate and not all(map(math.isfinite, trajectory.sampling_logprobs)):
                self._end_soon(running, NOT_FINITE)

    def observe(self, group: TrajectoryGroup) -> None:
        """Takes the rewards of a group, if it is complete and its adapter's versions are compared."""
        running = self._running.get(group.adapter)
        if running is None or running.outcome is not None:
            return
        outcome = running.comparison.observe(group)
        if outcome is not None or not running.comparison.includes(running.trained.live):
            self._end_soon(running, outcome or _REPLACED)

    # -- from beginning to end -------------------------------------------------------------------

    def _begin(self, trained: ComparedAdapter, comparison: LiveComparison, began: float | None = None) -> None:
        """Splits the requests for the adapter between the two versions, which are kept until the end. `began`: in an
        earlier process, in Unix time; None: now."""
        with ExitStack() as leases:
            for version in (comparison.live, comparison.candidate):
                leases.enter_context(self._versions.lease(str(version)))
            self._versions.split(trained.name, comparison.choose)
            kept = leases.pop_all()
        began = comparison.started if began is None else began
        running = _Running(comparison, trained, kept, began + comparison.settings.max_hours * 3600)
        self._running[trained.name] = running
        self._look_later(running)
        trained.hold()
        _log.info("comparing %s with %s on requests", comparison.candidate, comparison.live)
        self._tell("comparison_started", comparison.card())

    def _look_later(self, running: _Running) -> None:
        wait_s = min(max(running.until - time.time(), 0.0), _LOOK_S)
        running.timer = asyncio.get_running_loop().call_later(wait_s, self._look, running)

    def _look(self, running: _Running) -> None:
        if time.time() >= running.until:
            self._end_soon(running, OUT_OF_TIME)
        else:
            self._look_later(running)

    def _end_soon(self, running: _Running, outcome: ComparisonEnd) -> None:
        if running.outcome is None:
            running.outcome = outcome
            self._spawn(self._end(running, outcome))

    async def _end(self, running: _Running, outcome: ComparisonEnd) -> None:
        """Makes the winner live for all requests. If that fails, the version that is live now stays."""
        comparison, trained = running.comparison, running.trained
        winner = comparison.candidate if outcome.candidate_wins else comparison.live
        try:
            if not comparison.includes(trained.live):
                outcome = _REPLACED
            elif trained.live != winner:
                await trained.make_live(winner)
            elif outcome.candidate_wins:
                await trained.keep(winner)
        except Exception as error:  # noqa: BLE001 - whatever failed, requests are answered by the live version
            _log.exception("%s could not go live", winner)
            outcome = ComparisonEnd("failed", f"{winner} could not go live: {error}")
        self._leave(running, outcome)

    def _leave(self, running: _Running, outcome: ComparisonEnd) -> None:
        name, card = running.trained.name, running.comparison.card(outcome)
        del self._running[name]
        running.timer.cancel()
        self._versions.split(name, None)
        running.leases.close()
        self._last[name] = card
        self._ended[name][card.verdict] += 1
        running.trained.release()
        running.gone.set()
        _log.info("%s against %s: %s, %s", card.candidate, card.live, card.verdict, card.reason)
        self._tell("comparison_ended", card)

    def _tell(self, kind: str, card: ComparisonCard) -> None:
        self._emit(
            kind,
            adapter=card.adapter,
            live=str(card.live),
            candidate=str(card.candidate),
            automatic=card.automatic,
            verdict=card.verdict,
            reason=card.reason,
            live_requests=card.live_requests,
            candidate_requests=card.candidate_requests,
            live_rewards=card.live_rewards,
            candidate_rewards=card.candidate_rewards,
            live_mean=card.live_mean,
            candidate_mean=card.candidate_mean,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if a comparison that has ended holds anything."""
        for name, running in self._running.items():
            assert running.trained.name == name
            assert not running.gone.is_set()
            assert not running.timer.cancelled()


def install(training: TrainingService) -> CompetitionService:
    """Lets two versions of an adapter in training be compared."""
    parts, hooks = training.parts, training.hooks

    def trained(adapter: str | None, reader: Reader) -> ComparedAdapter:
        return ComparedAdapter(training.loop(adapter, reader), parts.checkpoints, parts.adapters)

    def begun(name: str) -> None:
        training.loop(name).entry = partial(competition.entry, name)
        competition.begin_again(name)

    settings, emit, spawn = parts.config.competition, training.emit, training.changes.spawn
    competition = CompetitionService(settings, trained, parts.adapters, emit, spawn)
    hooks.begun.append(begun)
    hooks.before_change.append(competition.check_idle)
    hooks.forgotten.append(competition.forget)
    hooks.closed.append(competition.close)
    hooks.wants.append(competition.includes)
    hooks.sampled.append(competition.drew)
    hooks.scored.append(competition.observe)
    hooks.check_integrity.append(competition.check_integrity)
    return competition


_REPLACED = ComparisonEnd("stopped", "another version went live")


def _settings(config: CompetitionConfig, spec: ComparisonSpec) -> CompetitionConfig:
    """The settings of one comparison. Raises InvalidRequestError if the smallest effect is no possible difference."""
    names = ("share", "smallest_effect", "max_rewards", "max_hours")
    given = {name: value for name in names if (value := getattr(spec, name)) is not None}
    settings = config.model_copy(update=given)
    span = settings.highest_reward - settings.lowest_reward
    if settings.smallest_effect >= span:
        raise InvalidRequestError(f"smallest_effect: must be below the range of rewards, {span:g}", "smallest_effect")
    return settings


def _comparison(trained: ComparedAdapter, selector: str, settings: CompetitionConfig) -> LiveComparison:
    """Raises UnknownModelError, InvalidRequestError, ConflictError: see `CompetitionService.start`."""
    live, candidate = trained.live, trained.version(selector)
    if candidate.name != trained.name:
        raise InvalidRequestError(f"candidate: {candidate} is no version of {trained.name!r}", "candidate")
    if live is None:
        raise ConflictError(f"No version of {trained.name!r} is live: there is nothing to compare with.", "candidate")
    if candidate == live:
        raise ConflictError(f"{candidate} is live already; name another version.", "candidate")
    if not trained.is_saved(candidate):
        raise ConflictError(
            f"{candidate} has no checkpoint, so training could not go on from it; name a checkpoint.", "candidate"
        )
    return LiveComparison(live, candidate, settings)
