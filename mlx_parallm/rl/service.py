"""TrainingService trains several adapters, with one trajectory buffer and one stream of events.

Collector ── trajectories with rewards ─▶ AdapterRun of each adapter ─▶ versions, checkpoints
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any

from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.core.adapters import check_name, check_tag
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ConflictError, ParaLLMError, UnknownModelError
from mlx_parallm.rl.collect import Collector
from mlx_parallm.rl.events import EventHistory, EventHub, Listener
from mlx_parallm.rl.parts import Changes, TrainingHooks, TrainingParts
from mlx_parallm.rl.reading import GroupReader
from mlx_parallm.rl.runs.store import JournalFile
from mlx_parallm.rl.status import (
    EvaluationResult,
    RolloutStatus,
    TrainingEvent,
    TrainingHistory,
    TrainingStatus,
    UpdateReport,
)
from mlx_parallm.rl.tracking import Tracking
from mlx_parallm.rl.trajectories import DropReason
from mlx_parallm.rl.trajectory_log import of_trainee
from mlx_parallm.rl.updates.adapter_training import AdapterTraining
from mlx_parallm.rl.updates.run import AdapterRun
from mlx_parallm.rl.updates.selection import Chosen
from mlx_parallm.rl.webhook import Webhook

_log = logging.getLogger(__name__)


class TrainingService:
    """Trains several adapters. Event loop's thread only. `adapter` None is the default adapter.

    Methods that name an adapter raise UnknownModelError if it is not trained, or if the `reader` does not see it.

    Attributes:
        trajectories, collected_groups: its parts. `parts`: those that it was given.
        hooks: where extras take part. `extras`: what they offer to requests, by name.
        changes: what must not be cut off by a client that leaves.
        ledger: counts what was learnt from.
        past: what has happened in the training of each adapter. `emit`, `add_sink`: see `EventHub`.
        is_asleep: whether the server sleeps, so that no rollouts are wanted now.
        own_rollouts: the status of the rollouts that the server samples by itself; None: it samples none.
    """

    def __init__(self, parts: TrainingParts, default_adapter: str) -> None:
        config = parts.config
        self.parts, self.hooks = parts, TrainingHooks()
        self.extras: dict[str, Any] = {}
        self.default_adapter = default_adapter
        self._hub = EventHub()
        self.emit, self.add_sink = self._hub.emit, self._hub.add_sink
        self._loops: dict[str, AdapterRun] = {}
        self._running: dict[str, asyncio.Task[None]] = {}  # the loop of each
        self._noted: tuple[str, ...] = ()  # those that the journal knows to be in training
        self.changes = Changes()
        self.trajectories = Collector(parts, self._loops, default_adapter, self.emit, self.changes, self.hooks)
        self.ledger = self.trajectories.ledger
        self.collected_groups = GroupReader(self.trajectories.buffer)
        self.past = EventHistory()
        self.add_sink(self.past.on_event)
        self.add_sink(self._on_event)
        self.is_asleep: Callable[[], bool] = lambda: False
        self.own_rollouts: Callable[[], RolloutStatus] | None = None
        self._tracking: Tracking | None = None
        url = config.divergence.webhook
        self._webhook = Webhook(url.get_secret_value()) if url else None
        if self._webhook is not None:
            self.add_sink(self._webhook.on_event)
        self._starting = asyncio.Lock()
        self._hold_reason = ""

    # -- start and end ---------------------------------------------------------------------------

    async def start_adapter(self, name: str, restore: bool = True) -> None:
        """Trains this adapter too; see `AdapterTraining.open`. A paused one is resumed. If its live version now comes
        from elsewhere, training starts again from that version.

        `restore`: the trajectories that waited for it when the process ended, in this run, wait again.

        Raises:
            ConfigError, StorageError: the journal of the run cannot be used.
            InvalidRequestError, ConflictError: it cannot be trained here, or not from its live version.
        """
        async with self._starting:
            loop = self._loops.get(name)
            if loop is None:
                check_name(name, "lora_adapter")
                training = AdapterTraining(name, self.parts, self.emit, name == self.default_adapter)
                loop = AdapterRun(training, self.trajectories.buffer, self.parts.config, self.emit, self.ledger)
                await loop.open()
                loop.hold(self._hold_reason)
                self._loops[name] = loop
                try:
                    if restore:
                        too_late = await self.trajectories.restore(name, loop)
                        for take in self.hooks.too_late:
                            await take(too_late)
                    for begun in self.hooks.begun:
                        begun(name)
                except Exception:  # without a loop that runs, what is collected for it would wait for ever
                    self.trajectories.withdraw(name)
                    await self._end(loop)
                    raise
                # In a context of its own, because its updates do not belong to the request that starts it.
                self._running[name] = self.changes.spawn(loop.run(), Context())
            elif (live := loop.training.live) is not None and loop.training.versions.staleness(live) is None:
                await loop.open()
            loop.resume()

    async def start_again(self) -> None:
        """Trains the adapters that were in training when the last process of the run ended."""
        self._noted = tuple(await self.parts.journal.read(JournalFile.trained) or ())
        for name in self._noted:
            try:
                await self.start_adapter(name)
            except ParaLLMError as error:
                _log.warning("%s was in training before the restart, and is not now: %s", name, error)
            else:
                _log.info("%s is in training again, as before the restart", name)

    async def stop(self, adapter: str | None = None, *, reader: Reader = EVERYTHING) -> TrainingStatus:
        """Ends the training of an adapter, after the running update. What was learnt is saved. The live version stays,
        unless there are updates that were not published: a version of them goes live. Trajectories that wait for it are
        dropped.

        Returns:
            The last status, with the state "stopped".

        Raises:
            ConflictError: it is the default adapter, or two of its versions are being compared.
            Exception: it could not be saved, and is still in training.
        """
        name = self.loop(adapter, reader).name
        if name == self.default_adapter:
            raise ConflictError(
                f"{name!r} is the default adapter, which is in training as long as the server trains; pause it "
                "with POST /v1/training/pause, or start the server without --enable-rl-training.",
                param="lora_adapter",
            )
        self.check_changeable(name)
        return await self.changes.finished(self._stop(name))

    async def _stop(self, name: str) -> TrainingStatus:
        async with self._starting:
            loop = self.loop(name)
            await loop.close()
            status = replace(loop.status(), state="stopped")
            self.trajectories.buffer.drop_all(name, DropReason.STOPPED)
            await self._end(loop)
            self._note_trained()
            return status

    async def _end(self, loop: AdapterRun) -> None:
        """Ends what `start_adapter` has begun, whether or not it came to its end."""
        del self._loops[loop.name]
        if (running := self._running.pop(loop.name, None)) is not None:
            running.cancel()
        loop.training.checkpoints.set_best(None)
        await self.parts.learner.close(loop.name)
        self.emit("stopped", adapter=loop.name)

    async def forget(self, adapter: str) -> None:
        """Removes all that is known of an adapter, which is not in training. Raises StorageError."""
        self.trajectories.buffer.forget(adapter)
        self.past.forget(adapter)
        for forgotten in self.hooks.forgotten:
            forgotten(adapter)
        await self.parts.journal.forget(adapter)
        if self.parts.log is not None:
            await self.parts.log.forget(of_trainee(adapter))

    def _note_trained(self) -> None:
        """Keeps for a restart which adapters are in training."""
        trained = tuple(name for name in self._loops if name != self.default_adapter)
        if trained != self._noted:
            self._noted = trained
            self.parts.journal.trains(trained)

    async def close(self) -> None:
        """Ends training: an update in progress is given up, and what is in no checkpoint yet is saved.

        Raises:
            Exception: the error of the first adapter that could not be saved. The others are saved.
        """
        parts = self.parts
        try:
            for ending in self.hooks.ending:
                await ending()
            await self._close_adapters()
        finally:
            parts.environment_thread.close()
            await parts.scorers.close()
            if parts.teacher is not None:
                await parts.teacher.close()

    async def _close_adapters(self) -> None:
        await self.changes.cancel()
        for closed in self.hooks.closed:
            closed()
        await self.trajectories.close()
        errors = await asyncio.gather(*(loop.close() for loop in self._loops.values()), return_exceptions=True)
        self._hub.close()
        if self._webhook is not None:
            await self._webhook.close()
        await self.parts.journal.close()
        if self.parts.log is not None:
            await self.parts.log.close()
        for error in errors:
            if error is not None:
                raise error

    # -- updates ---------------------------------------------------------------------------------

    async def update(
        self,
        adapter: str | None = None,
        given: Sequence[GivenTrajectory] | None = None,
        publish: bool = True,
        checkpoint_name: str | None = None,
        signal: Signal | None = None,
        progress: Mapping[str, float] | None = None,
        chosen: Chosen | None = None,
        *,
        reader: Reader = EVERYTHING,
    ) -> UpdateReport:
        """Runs one update and returns when its version is live.

        Args:
            given: the data to train on; None uses the complete groups that wait.
            signal: what `given` teaches; None: its rewards. Without `given`, only what waits and teaches this is
                trained on; None: what has rewards or, if there is nothing, any others.
            checkpoint_name: also saves the policy under this tag, even if the update was held or skipped.
            progress: see `AdapterTraining.progress`.
            chosen: see `GroupSelection.take_all`.

        Raises:
            StorageError: the update succeeded but could not be saved.
        """
        loop = self.loop(adapter, reader)
        tag = None if checkpoint_name is None else check_tag(checkpoint_name)
        self.check_changeable(loop.name)
        return await self.changes.finished(loop.update(given, publish, tag, progress, signal, chosen))

    async def evaluate_if_due(self, adapter: str | None = None, early: bool = False) -> EvaluationResult | None:
        """See `AdapterTraining.evaluate_if_due`."""
        return await self.changes.finished(self.loop(adapter).evaluate_if_due(early))

    def status(self, adapter: str | None = None, *, reader: Reader = EVERYTHING) -> TrainingStatus:
        """A snapshot of the training of one adapter."""
        name, trained = reader.named(adapter, self.default_adapter), tuple(filter(reader.sees, self._loops))
        if adapter is None and name not in self._loops:
            return TrainingStatus(state="idle", adapter=name, trained=trained)
        status, log = self.loop(name, reader).status(), self.parts.log
        rollouts = self.own_rollouts() if self.own_rollouts and status.adapter == self.default_adapter else None
        is_sampling = self.trajectories.sampling[status.adapter] > 0 or (
            rollouts is not None and rollouts.state == "drawing"
        )
        return replace(
            status,
            state="running" if status.state == "idle" and is_sampling else status.state,
            checkpoints=tuple(
                name
                for card in self.parts.checkpoints.cards(status.adapter)
                for name in (card.name, *card.tags_beside(status.best))
            ),
            trained=trained,
            rollouts=rollouts,
            turns=dict(self.trajectories.groups.turns[status.adapter]),
            detail={
                **status.detail,
                "trajectory_log_failures": log.failures if log else 0,
                "webhook_failures": self._webhook.failures if self._webhook else 0,
                "tracker_failures": dict(self._tracking.failures) if self._tracking else {},
            },
        )

    def statuses(self, *, reader: Reader = EVERYTHING) -> Sequence[TrainingStatus]:
        """The status of every trained adapter that the reader sees, the default one first, which need not have been
        started."""
        default = [self.status(reader=reader)] if reader.sees(self.default_adapter) else []
        others = (name for name in self._loops if name != self.default_adapter and reader.sees(name))
        return [*default, *(self.status(name, reader=reader) for name in others)]

    async def start(self, adapter: str | None = None, *, reader: Reader = EVERYTHING) -> TrainingStatus:
        """Trains this adapter too. Training starts from its live version, or from new weights if it has none."""
        name = reader.named(adapter, self.default_adapter)
        await self.changes.finished(self.start_adapter(name))
        self._note_trained()
        return self.status(name, reader=reader)

    async def pause(self, adapter: str | None = None, *, reader: Reader = EVERYTHING) -> TrainingStatus:
        """Stops automatic updates. Trajectories are still collected."""
        self.loop(adapter, reader).pause()
        return self.status(adapter, reader=reader)

    async def resume(self, adapter: str | None = None, *, reader: Reader = EVERYTHING) -> TrainingStatus:
        """Makes automatic updates again."""
        self.loop(adapter, reader).resume()
        return self.status(adapter, reader=reader)

    def hold(self, reason: str) -> None:
        """Stops the automatic updates of all adapters, until the next call with "" for the reason. Updates that clients
        ask for are made."""
        self._hold_reason = reason
        for loop in self._loops.values():
            loop.hold(reason)

    async def rollback(
        self, adapter: str | None = None, to: str | None = None, *, reader: Reader = EVERYTHING
    ) -> TrainingStatus:
        """Serves an earlier version and continues training from it.

        Args:
            to: a checkpoint's name or tag; None is `best`.

        Raises:
            ConflictError: there is no such version.
        """
        loop = self.loop(adapter, reader)
        self.check_changeable(loop.name)
        await self.changes.finished(loop.roll_back(to))
        return self.status(adapter, reader=reader)

    def has_adapter(self, name: str) -> bool:
        """Whether an adapter of this name is in training, whatever version of it is live."""
        return name in self._loops

    def trains(self, selector: str | None, *, reader: Reader = EVERYTHING) -> bool:
        """Whether the selector names the live version of an adapter that the reader sees and that is trained here:
        `save` must save it."""
        loop = self._loops.get(self.default_adapter if selector is None else selector)
        if loop is None or not reader.sees(loop.name):
            return False
        return loop.training.live in (None, loop.training.versions.latest)

    async def save(
        self,
        adapter: str | None,
        step: int | None,
        tags: Sequence[str],
        metrics: Mapping[str, float],
        *,
        reader: Reader = EVERYTHING,
    ) -> CheckpointCard:
        """Writes the policy and its optimizer state as a checkpoint, after the running update has ended.

        Args:
            step: None is the step that the policy has reached.

        Raises:
            InvalidRequestError: a tag is not a plain name.
            ConflictError: there is a checkpoint of that step with different content.
        """
        tags = [check_tag(tag) for tag in tags]
        return await self.changes.finished(self.loop(adapter, reader).save(step, tags, metrics))

    # -- events ----------------------------------------------------------------------------------

    def events(self, after: str = "", *, reader: Reader = EVERYTHING) -> Listener:
        """The events that the reader sees, from now on, until the iterator is closed. A slow listener loses some; see
        `TrainingEvent`.

        Args:
            after: the id of the last event that the listener has had; those that it has missed since come first.
        """
        return self._hub.listen(after, reader)

    def history(self, adapter: str | None, limit: int, *, reader: Reader = EVERYTHING) -> TrainingHistory:
        """What has happened in the training of an adapter since the run began: the newest `limit` events."""
        history = self.past.of(self.status(adapter, reader=reader).adapter, limit, self._hub.last_id)
        return replace(history, data=tuple(seen for event in history.data if (seen := event.seen_by(reader))))

    def track(self, tracking: Tracking) -> None:
        """Gives every update and evaluation from now on to trackers."""
        self._tracking = tracking
        self.add_sink(tracking.on_event)

    def loop(self, adapter: str | None = None, reader: Reader = EVERYTHING) -> AdapterRun:
        """The training of an adapter. Raises UnknownModelError."""
        name = reader.named(adapter, self.default_adapter)
        if name not in self._loops:
            raise UnknownModelError(
                f"{name!r} is not trained here; begin with POST /v1/training/start.", param="lora_adapter"
            )
        return self._loops[name]

    def check_changeable(self, name: str) -> None:
        """Raises ConflictError: an extra needs the adapter as it is now."""
        for check in self.hooks.before_change:
            check(name)

    def _on_event(self, event: TrainingEvent) -> None:
        if event.kind == "evaluation":
            self.ledger.evaluated(str(event.data["adapter"]), event.data["metrics"]["eval_mean"])

    def check_integrity(self) -> None:
        """Raises AssertionError if the buffer's counts and contents disagree, or if an extra finds a fault."""
        self.trajectories.buffer.check_integrity()
        for check in self.hooks.check_integrity:
            check()
