"""GRPOTrainer: updates of policies on the served base weights, as units of device work.

    begin(policy, batch) ─▶ micro-step ─▶ micro-step ─▶ … ─▶ clip, AdamW, check ─▶ done(outcome)
                            forward, backward, gradients added up

A micro-step is cut into units that keep to a latency budget (`pacing`). Updates of one policy follow each other. Those
of different policies go on side by side: a micro-step takes a portion of the oldest, and of each other one whose
portion still fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from mlx_parallm.rl.footprint import Footprint
from mlx_parallm.rl.forwards import Forwards, Scores, Share
from mlx_parallm.rl.losses import k3
from mlx_parallm.rl.pacing import Kind, Pacer, Stage
from mlx_parallm.rl.packing import MicroBatch, Portion, pack
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import UpdateBatch
from mlx_parallm.rl.settings import TrainerSettings
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.trainable import Params, Span, TrainableModel
from mlx_parallm.rl.update import Done, Update


class GRPOTrainer:
    """Implements `core.TrainingWork`. Device thread only, but for `bytes_held` and `peak_bytes`."""

    def __init__(self, model: TrainableModel, settings: TrainerSettings) -> None:
        self.model = model
        self.settings = settings
        self._bytes = 0
        self._forwards = Forwards(model, settings)
        self._pacer = Pacer()
        self._footprint = Footprint()
        self._policies: dict[str, Policy] = {}
        self._queue: list[Update] = []
        self._job: Iterator[None] | None = None
        self._parties: dict[Update, int] = {}  # of the job, and how much of it is theirs

    # -- policies --------------------------------------------------------------------------------

    def open(self, name: str, start: PolicySnapshot | None = None) -> Policy:
        """A policy to be trained, in the place of the one that had this name. Raises what `Policy` raises."""
        policy = Policy(self.model.layout, self.settings.lora, self.settings.optimizer, start)
        self._policies[name] = policy
        self._count_bytes()
        return policy

    def begin(self, policy: Policy, batch: UpdateBatch, done: Done) -> None:
        """Queues one update; `done` is told what came of it, on the device thread."""
        self._queue.append(Update(policy, batch, done))
        self._count_bytes()

    @property
    def bytes_held(self) -> int:
        """Of open policies and optimizer states, and of what is kept of them to go back to; of gradients and a
        micro-step's activations while updates wait. Any thread may read it."""
        return self._bytes + sum(policy.kept_nbytes for policy in tuple(self._policies.values()))

    @property
    def peak_bytes(self) -> int:
        """The most that MLX has held. Its own counter is reset whenever a unit of training is measured."""
        return self._footprint.peak

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return bool(self._queue)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`."""
        self._pacer.budget = seconds

    def advance(self) -> None:
        """One unit: of a micro-step, or of what follows an update's last one; of the next one too where there is time.
        It ends with an update: what that has learnt is waited for."""
        self._pacer.begin()
        finished = self._go_on()
        while not finished and self._job is None and self._queue and self._pacer.has_room:
            finished = self._go_on()
        outcomes = [(update, update.outcome()) for update in finished]
        for update in finished:
            self._queue.remove(update)
            update.settle()
        self._count_bytes()
        for update, outcome in outcomes:
            update.done(outcome)

    def _go_on(self) -> list[Update]:
        """With the job that is under way, or the next one. Returns the updates that are finished with it."""
        started = time.monotonic()
        if self._job is None:
            self._footprint.begin()
            self._job = self._next_job()
        with self._footprint.measured():
            ended = next(self._job, self) is self
        self._share_out(time.monotonic() - started)
        finished = [update for update in self._parties if ended and update.finished]
        if ended:
            self._end_job()
        return finished

    def reset(self) -> None:
        """Gives up the updates of the unit that failed; their policies are as before."""
        failed = [update for update in self._queue if update in self._parties or update.finished] or self._queue[:1]
        self._end_job()
        for update in failed:
            self._queue.remove(update)
        self._count_bytes()
        for update in failed:
            update.fail()

    def abandon(self, policy: Policy) -> None:
        """Gives up the updates of this policy, and those that share a micro-step with one of them."""
        if any(update.policy is policy for update in self._parties):
            self.reset()
        given_up = [update for update in self._queue if update.policy is policy]
        self._queue = [update for update in self._queue if update.policy is not policy]
        self._count_bytes()
        for update in given_up:
            update.fail()

    def _next_job(self) -> Iterator[None]:
        """The end of an update whose micro-steps are all made, or a micro-step."""
        updates = self._under_way()
        made = next((update for update in updates if not update.portions), None)
        return self._micro_step(updates) if made is None else self._conclude(made)

    def _under_way(self) -> list[Update]:
        """The oldest update of each policy, in order of arrival; all started."""
        oldest: dict[Policy, Update] = {}
        for update in self._queue:
            oldest.setdefault(update.policy, update)
        for update in oldest.values():
            if not update.started:
                self._parties = {update: 1}
                update.start(self.settings.micro_batch_tokens)
        return list(oldest.values())

    def _end_job(self) -> None:
        self._job, self._parties = None, {}
        self._footprint.end()

    def _share_out(self, seconds: float) -> None:
        """Of a unit that has ended well, among the updates that were in it."""
        whole = sum(self._parties.values())
        for update, part in self._parties.items():
            update.device_seconds += seconds * part / whole

    def _count_bytes(self) -> None:
        held = sum(policy.nbytes for policy in self._policies.values())
        if self._queue:
            training = {update.policy for update in self._queue}
            held += self._footprint.working + sum(policy.gradient_nbytes for policy in training)
        self._bytes = held

    # -- micro-steps -----------------------------------------------------------------------------

    def _micro_step(self, updates: Sequence[Update]) -> Iterator[None]:
        parts = self._take(updates)
        self._parties = {update: portion.size for update, portion in parts}
        yield from self._pacer.run(self._add_up(parts), sum(self._parties.values()))

    def _take(self, updates: Sequence[Update]) -> list[tuple[Update, Portion]]:
        room: float = self.settings.micro_batch_tokens
        parts: list[tuple[Update, Portion]] = []
        for update in updates:
            portion = update.take(room if parts else math.inf)
            if portion is not None:
                parts.append((update, portion))
                room -= portion.size
        return parts

    def _add_up(self, parts: Sequence[tuple[Update, Portion]]) -> list[Stage]:
        """The stages of it all. Nobody else has the gradients then, so that MLX adds them in place."""
        shares = [
            Share(
                pack(portion.samples),
                update.policy.params,
                update.policy.scale,
                update.totals.for_rows(portion.samples),
            )
            for update, portion in parts
        ]
        made = self._forwards.gradients(shares)
        for (update, portion), part in zip(parts, made.parts, strict=True):
            update.include(portion, part)
        return [*made.stages, *self._backward([update for update, _ in parts])]

    def _backward(self, updates: Sequence[Update]) -> Iterator[Stage]:
        """From the top layer down, each with its gradients."""
        kind = Kind.TURN
        for paths in reversed(self.model.layer_paths):
            if leaves := [leaf for update in updates for leaf in update.gradients(paths)]:
                yield Stage(kind, leaves)
                kind = Kind.BACKWARD

    def _scores(self, batch: MicroBatch, params: Params | None, scale: float) -> Scores:
        """Of one micro-batch under these factors; None: under the base."""
        spans = None if params is None else [Span(batch.tokens.size, params, scale)]
        (scores,) = self._forwards.scores([batch], spans).scores
        return scores

    # -- the end of an update --------------------------------------------------------------------

    def _conclude(self, update: Update) -> Iterator[None]:
        """Where it is asked for, how far the policy was from the base; the optimizer's step; and how far that moved it.

        Nothing comes after the step that could come before: it is what a new version waits for."""
        settings = self.settings
        self._parties = {update: 1}
        if settings.measure_kl and not settings.loss.kl_coef:
            for portion in update.sampled_portions():
                yield from self._compare(update, portion)
                yield
        update.step(settings.optimizer.max_grad_norm)
        if settings.measure_step_kl and not update.skipped:
            for portion in update.all_portions:
                yield
                yield from self._measure(update, portion)
        update.finished = True

    def _measure(self, update: Update, portion: Portion) -> Iterator[None]:
        """Adds up k3 of the policy before the step against the one after it, over the portion's tokens.

        Logprobs before the step are the micro-step's own, so it does not matter who drew the tokens.
        """
        batch = pack(portion.samples)
        passed = self._forwards.scores([batch], [Span(batch.tokens.size, update.policy.params, update.policy.scale)])
        moved = k3(update.logprobs[portion], passed.scores[0][0]).sum()
        yield from self._pacer.run(passed.stages(moved), portion.size)
        update.moved(moved)

    def _compare(self, update: Update, portion: Portion) -> Iterator[None]:
        """Takes in the mean k3 of the policy before the step against the base, over the portion's tokens."""
        passed = self._forwards.scores([pack(portion.samples)], None)
        apart = k3(update.logprobs[portion], passed.scores[0][0]).mean()
        yield from self._pacer.run(passed.stages(apart), portion.size)
        update.apart(apart)
