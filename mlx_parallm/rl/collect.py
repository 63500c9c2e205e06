"""Collector: takes answers and rewards in. Each is on the disk before the server acknowledges it to the client.

request to be collected ─▶ record ─▶ Journal ─▶ Groups ─▶ TrajectoryBuffer ─▶ AdapterRun of the adapter
                                                  └─ rewards: ScoringService, feedback
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.readers import EVERYTHING, Reader
from mlx_parallm.core.requests import CollectionSpec, Event, GenerationRequest
from mlx_parallm.core.trajectories import FeedbackCard, GroupCard, Trajectory
from mlx_parallm.errors import ConflictError, RequestError, StorageError, UnknownTrajectoryError, shown
from mlx_parallm.rl.buffer import TrajectoryBuffer
from mlx_parallm.rl.environments.files import PROBLEM_ID
from mlx_parallm.rl.events import Emit
from mlx_parallm.rl.groups import Added, Groups, group_of_episode
from mlx_parallm.rl.parts import Changes, TrainingHooks, TrainingParts
from mlx_parallm.rl.recording import outlived, record
from mlx_parallm.rl.runs.journal import Journal
from mlx_parallm.rl.runs.records import Arrival, Closed, EpisodeReward, Feedback, GroupEntry, Score, TokenRewards
from mlx_parallm.rl.scoring.scorers import ANSWER, lacks_answer, names_reward, terms_without_answer
from mlx_parallm.rl.sources import SourceLedger
from mlx_parallm.rl.trajectories import DropReason, TrajectoryGroup, TrajectoryState
from mlx_parallm.rl.updates.run import AdapterRun

LateFeedback = Callable[[str, float, str, RequestError, Reader], Awaitable[FeedbackCard]]

_log = logging.getLogger(__name__)


class Collector:
    """Implements `core.CollectingClient`. Event loop's thread only.

    A trajectory trains the adapter that sampled it. Trajectories of the base model train the default adapter, as long
    as the base model is in its version history.

    Args:
        loops: of all adapters in training, by name; changed by the owner.
        default_adapter: what trajectories of the base model train.
        changes: keep what has begun from being cut off by a client that leaves.
        hooks: of extras.

    Attributes:
        buffer: the groups that wait, and the last ones that have left.
        groups: what changes them.
        ledger: counts the groups that leave the buffer.
        late_feedback: takes opinions of answers that do not wait, with the error that they lead to otherwise.
        sampling: requests whose answers are being sampled, by the adapter that they train.
    """

    def __init__(
        self,
        parts: TrainingParts,
        loops: Mapping[str, AdapterRun],
        default_adapter: str,
        emit: Emit,
        changes: Changes,
        hooks: TrainingHooks,
    ) -> None:
        self._parts, self._journal = parts, parts.journal
        self._loops, self._default = loops, default_adapter
        self._emit, self._finished, self._hooks = emit, changes.finished, hooks
        self.ledger = SourceLedger()
        self.late_feedback: LateFeedback | None = None
        self.sampling: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()  # trajectories that are given, by source, on their way into the buffer
        self.buffer = TrajectoryBuffer(parts.config.trajectory_buffer_size, self._on_group_end, self._on_drop)
        self.groups = Groups(self.buffer, parts.scorers, parts.config, parts.journal, self._on_ready, emit)

    async def restore(self, name: str, loop: AdapterRun) -> Sequence[Feedback]:
        """Puts the trajectories of the journal that wait for an adapter back into the buffer, with their rewards.

        Returns:
            The opinions of answers that are too old by now.
        """
        entries = await self._journal.read(lambda file: file.waiting(name)) or ()
        versions = [entry.trajectories[0].adapter for entry in entries if isinstance(entry, Arrival)]
        newest = max((version.version for version in versions if version and version.name == name), default=0)
        loop.training.number_versions_from(newest + 1)  # no other version gets the number of one that has sampled
        too_late = self.groups.restore(name, entries, loop.reason_against)
        if versions:
            _log.info("%d collected requests wait for %s again", len(versions), name)
            loop.wake()
        return too_late

    def withdraw(self, name: str) -> None:
        """Takes what waits for an adapter out of the buffer. In the journal it still waits, for a later `restore`."""
        waiting = [turn for group in self.buffer.of(name) for member in group.members for turn in member.turns]
        journal, self._journal = self._journal, Journal()  # which is not told that they are dropped
        try:
            self.buffer.remove([turn.trajectory_id for turn in waiting], DropReason.STOPPED)
        finally:
            self._journal = journal

    async def close(self) -> None:
        """Cancels all scoring."""
        await self.groups.close()

    # -- answers ---------------------------------------------------------------------------------

    async def check(
        self, collection: CollectionSpec, adapter: AdapterRef, reader: Reader, prompt: str | None = None
    ) -> CollectionSpec:
        """See `core.CollectingClient.check`."""
        loop = self._loops.get(self._trained_by(adapter))
        included = loop is not None and (self._is_wanted(adapter) or loop.training.versions.includes_ever(adapter))
        if loop is None or not included or not reader.sees(loop.name):
            raise ConflictError(
                f"{adapter} is not trained here, so nothing that it draws can be collected; name an adapter that is, "
                "or POST /v1/training/start.",
                param="collect_trajectory",
            )
        self.groups.check(collection, loop.name, reader.name)
        task = self._parts.tasks.find(collection.metadata.get(PROBLEM_ID), prompt)
        if task is not None and names_reward(collection):
            collection = replace(collection, metadata={**task.collection.metadata, **collection.metadata})
        if lacks_answer(collection):
            answer = None if task is None else task.collection.metadata.get(ANSWER)
            if answer is None:
                for scorer in terms_without_answer(collection):  # a fault in these is reported all the same
                    await self._parts.scorers.check(replace(collection, scorer=scorer))
                lacking = f"Neither metadata nor a task of the server has an answer for {collection.scorer}"
                return replace(collection, scorer=None, unscored=f"{lacking}, so the trajectories wait for feedback.")
            collection = replace(collection, metadata={**collection.metadata, ANSWER: answer})
        await self._parts.scorers.check(collection)
        return collection

    def collect(self, request: GenerationRequest, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """See `core.CollectingClient.collect`."""
        if request.stopping.max_tokens == 0:
            return events
        adapter = self._trained_by(request.adapter)
        on_abort = partial(self._count_lost, adapter, request.sequences, DropReason.ABORTED)
        return record(request, events, self._collect_group, on_abort, self.samples(adapter))

    @contextmanager
    def samples(self, adapter: str) -> Iterator[None]:
        """Answers that train an adapter are being sampled while the block runs."""
        self.sampling[adapter] += 1
        try:
            yield
        finally:
            self.sampling[adapter] -= 1

    async def _collect_group(self, trajectories: Sequence[Trajectory]) -> str:
        return await self._finished(self._add_group(trajectories))

    async def _add_group(self, trajectories: Sequence[Trajectory]) -> str:
        """Keeps the answers of a request, and returns why they will not be trained on, or ""."""
        for sampled in self._hooks.sampled:
            sampled(trajectories)
        try:
            return await self._keep(trajectories)
        except StorageError as error:
            adapter = self._trained_by(_version(trajectories))
            self._count_lost(adapter, len(trajectories), DropReason.NOT_RECORDED)
            if (loop := self._loops.get(adapter)) is not None:
                loop.pause(str(error))
            return f"{error}: these trajectories will not be trained on."

    async def receive(self, trajectories: Sequence[Trajectory]) -> str:
        """Keeps the answers of one request to one prompt that another server has sampled, and returns when they are
        on the disk.

        Returns:
            Why they will not be trained on, or "".

        Raises:
            RequestError: they cannot be collected; see `check`.
            StorageError: they could not be written, and are not added.
        """
        first = trajectories[0]
        collection = await self.check(first.collection, _version(trajectories), Reader(first.owner or ""))
        return await self._finished(self._keep([replace(each, collection=collection) for each in trajectories]))

    async def collect_episodes(self, trajectories: Sequence[Trajectory], rewards: Mapping[str, float]) -> str:
        """Keeps the turns of a group of episodes that have ended, and returns when they are on the disk.

        Args:
            trajectories: the turns of all episodes of the group, sampled by one version; those of an episode in order.
            rewards: by episode id. Episodes without one are scored by the scoring function of the group.

        Returns:
            Why they will not be trained on, or "".

        Raises:
            StorageError: they could not be written, and will not be trained on.
        """
        last = {each.collection.episode_id: each.trajectory_id for each in trajectories}
        entries: list[GroupEntry] = [Score(last[episode], reward) for episode, reward in rewards.items()]
        entries.append(Closed(trajectories[0].group_id, trajectories[0].owner or ""))
        added = await self._finished(self._add(trajectories, entries))
        return "" if added.dropped is None else self._why(added.dropped, _version(trajectories))

    async def _keep(self, trajectories: Sequence[Trajectory]) -> str:
        added, collection = await self._add(trajectories), trajectories[0].collection
        if added.dropped is not None:
            return f"{self._why(added.dropped, _version(trajectories))}: these trajectories will not be trained on."
        if added.apart:
            why = collection.unmatched or "the prompt does not continue the tokens of an earlier turn"
            return f"This turn becomes a sample of its own: {why}."
        return collection.unscored

    async def _add(self, trajectories: Sequence[Trajectory], entries: Sequence[GroupEntry] = ()) -> Added:
        """Writes trajectories of an engine into the journal, with the rewards that came with them, and adds them."""
        version = _version(trajectories)
        adapter = self._trained_by(version)
        await self._journal.accept(adapter, trajectories, entries)
        loop = self._loops.get(adapter)
        refused = loop.reason_against(version) if loop else DropReason.UNKNOWN_VERSION
        return self.groups.add(adapter, trajectories, None if self._is_wanted(version) else refused, entries)

    def _why(self, dropped: DropReason, version: AdapterRef) -> str:
        config = self._parts.config
        if dropped is DropReason.BUFFER_FULL:
            return f"There is no room for them in the buffer of {config.trajectory_buffer_size} trajectories"
        if dropped is DropReason.CLOSED:
            return "Their group is closed"
        loop = self._loops.get(self._trained_by(version))
        if dropped is DropReason.STALE and loop is not None:
            versions = loop.training.versions
            return (
                f"{version} is {versions.staleness(version)} versions behind {versions.latest}, and max_staleness is "
                f"{config.max_staleness}"
            )
        return f"{version} is no version that training continues from"

    def _count_lost(self, adapter: str, trajectories: int, reason: DropReason) -> None:
        """Counts trajectories that are not collected. `reason`: one of NEVER_COLLECTED."""
        self.buffer.drops[adapter][reason] += trajectories
        self._emit("dropped", adapter=adapter, reasons={reason.value: trajectories})

    def _is_wanted(self, version: AdapterRef) -> bool:
        """Whether an extra wants the answers of a version however old it is."""
        return any(wants(version) for wants in self._hooks.wants)

    def _trained_by(self, version: AdapterRef) -> str:
        """Name of the adapter that trajectories of this version train."""
        return self._default if version == BASE_ADAPTER else version.name

    # -- groups that come with their rewards -----------------------------------------------------

    async def keep(
        self, adapter: str, source: str, trajectories: Sequence[Trajectory], entries: Sequence[Score | Feedback]
    ) -> None:
        """Adds a group that comes with its rewards, when it is on the disk.

        Raises:
            QueueFullError: too many trajectories wait, in all or of this source.
            StorageError: it could not be written, and is not added.
        """
        size = len(trajectories)
        self.buffer.check_room(source, size, self._coming)
        self._coming[source] += size
        try:
            await self._journal.accept(adapter, trajectories, entries)
        finally:
            self._coming[source] -= size
            self._coming += Counter()  # forgets sources of which none come any more
        if (dropped := self.groups.add(adapter, trajectories, entries=entries).dropped) is not None:
            raise ConflictError(f"The trajectories were dropped ({dropped}): they will not be trained on.")

    # -- rewards ---------------------------------------------------------------------------------

    async def feedback(
        self, trajectory_id: str, score: float, user: str = "", reader: Reader = EVERYTHING
    ) -> FeedbackCard:
        """See `core.CollectingClient.feedback`."""
        return await self._finished(self._feedback(trajectory_id, score, user, reader))

    async def _feedback(self, trajectory_id: str, score: float, user: str, reader: Reader) -> FeedbackCard:
        try:
            group = await self.enter(Feedback(trajectory_id, score, user, reader.bound), reader)
        except (UnknownTrajectoryError, ConflictError) as error:
            if self.late_feedback is None:
                raise
            return await self.late_feedback(trajectory_id, score, user, error, reader)
        return self.opinion(group, trajectory_id, user, late=False)

    def opinion(self, group: TrajectoryGroup, trajectory_id: str, user: str, late: bool) -> FeedbackCard:
        """Counts an opinion of an answer, which its group has. Returns what became of it."""
        self.ledger.opinion(group.adapter, user)
        member = next(each for each in group.members if any(t.trajectory_id == trajectory_id for t in each.turns))
        opinions = member.opinions[trajectory_id].values()
        return FeedbackCard(sum(opinions) / len(opinions), len(opinions), late)

    async def reward_tokens(self, trajectory_id: str, rewards: Sequence[float], reader: Reader = EVERYTHING) -> None:
        """See `core.CollectingClient.reward_tokens`."""
        await self._finished(self.enter(TokenRewards(trajectory_id, tuple(rewards), reader.bound), reader))

    async def reward_episode(self, episode_id: str, group_id: str, score: float, reader: Reader = EVERYTHING) -> None:
        """See `core.CollectingClient.reward_episode`."""
        owner = self._owner(group_of_episode(episode_id, group_id), reader)
        await self._finished(self.enter(EpisodeReward(episode_id, group_id, score, owner), reader))

    async def close_group(self, group_id: str, reader: Reader = EVERYTHING) -> GroupCard:
        """See `core.CollectingClient.close_group`."""
        return _card(await self._finished(self.enter(Closed(group_id, self._owner(group_id, reader)), reader)))

    async def enter(self, entry: GroupEntry, reader: Reader = EVERYTHING) -> TrajectoryGroup:
        """Writes an entry into the journal, and applies it. Returns its group.

        Raises:
            StorageError: it could not be written, and is not applied.
            RequestError: it does not apply; see `Groups.group_of`.
            UnknownTrajectoryError: the reader does not see the adapter that the group trains.
        """
        group = self.groups.group_of(entry)
        if not reader.sees(group.adapter):
            raise UnknownTrajectoryError("No trajectory has this id, or it is forgotten by now.")
        await self._journal.entered(group.adapter, group.group_id, entry)
        return self.groups.apply(entry)  # the group may have been trained on meanwhile

    def _owner(self, group_id: str, reader: Reader) -> str:
        """The owner of the group that a reader means by its id: its own one, or else another one that it may read.

        Raises:
            ConflictError: several keys have such a group, or only keys whose groups have left.
        """
        found = self.buffer.named(group_id)
        owners = {group.owner for group in found if reader.may_read(group.members[0].trajectory.owner)}
        if reader.reads_all and not owners and self.buffer.has_left(group_id, None):
            raise ConflictError("The group has been trained on or dropped already.", param="group_id")
        if reader.name in owners or not owners:
            return reader.name
        if len(owners) > 1:
            raise ConflictError(
                f"Several keys have a group {shown(group_id)}: use the key of the one that you mean.", param="group_id"
            )
        return owners.pop()

    # -- what is here ----------------------------------------------------------------------------

    def cards(self, adapter: str) -> tuple[GroupCard, ...]:
        """The groups of an adapter that are in the buffer, oldest first."""
        return tuple(map(_card, self.buffer.of(adapter)))

    # -- the end of a group ----------------------------------------------------------------------

    def _on_ready(self, group: TrajectoryGroup) -> None:
        for scored in self._hooks.scored:
            scored(group)
        if (loop := self._loops.get(group.adapter)) is not None:  # it may have been stopped
            loop.wake()

    def _on_drop(self, trajectories: Sequence[Trajectory], reason: str) -> None:
        self._journal.dropped([trajectory.trajectory_id for trajectory in trajectories], reason)
        for dropped in self._hooks.dropped:
            dropped(trajectories)

    def _on_group_end(self, group: TrajectoryGroup) -> None:
        if dropped := group.in_state(TrajectoryState.DROPPED):
            reasons = Counter(str(member.reason) for member in dropped)
            self._emit("dropped", **group.event_data, reasons=dict(reasons))
        self.ledger.ended(group)
        for ended in self._hooks.ended:
            ended(group)
        for copy, opinions in outlived(group):
            self._keep_late(group.adapter, copy, opinions)
        if self._parts.log is not None:
            self._parts.log.append(group)

    def _keep_late(self, adapter: str, copy: Trajectory, opinions: Sequence[Feedback]) -> None:
        """Keeps the opinions of an answer that was dropped. If an opinion that came after that has made the copy, the
        others join it."""
        if (known := self.buffer.member(copy.trajectory_id)) is None:
            self._journal.added(adapter, [copy], opinions)
            self.groups.add(adapter, [copy], entries=opinions)
            return
        newer = known[1].opinions[copy.trajectory_id]
        for opinion in opinions if known[1].is_open else ():
            if opinion.user not in newer:
                self._journal.noted(adapter, copy.group_id, opinion)
                self.groups.apply(opinion)


def _version(trajectories: Sequence[Trajectory]) -> AdapterRef:
    """The version that sampled trajectories of an engine."""
    version = trajectories[0].adapter
    assert version is not None
    return version


def _card(group: TrajectoryGroup) -> GroupCard:
    return GroupCard(
        group_id=group.group_id,
        adapter=group.adapter,
        members=len(group.members),
        rewarded=len(group.scored) + len(group.in_state(TrajectoryState.TRAINING)),
        complete=group.complete,
    )
