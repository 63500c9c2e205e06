"""GRPOTrainer: updates of policies on the served base weights, as units of device work.

    begin(policy, batch) ─▶ micro-step ─▶ micro-step ─▶ … ─▶ clip, AdamW, check ─▶ done(outcome)
                            forward, backward, gradients added up

Updates of one policy follow each other. Those of different policies go on side by side: a micro-step takes a portion of
the oldest, and of each other one whose portion still fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import mlx.core as mx

from mlx_parallm.model.device import on_cpu
from mlx_parallm.rl.footprint import Footprint
from mlx_parallm.rl.forwards import Forwards, Scores, Share
from mlx_parallm.rl.losses import k3
from mlx_parallm.rl.pacing import Pacer, TokenCost
from mlx_parallm.rl.packing import MicroBatch, Portion, pack
from mlx_parallm.rl.policy import Policy
from mlx_parallm.rl.samples import UpdateBatch, UpdateOutcome
from mlx_parallm.rl.settings import TrainerSettings
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.trainable import Params, Span, TrainableModel
from mlx_parallm.rl.update import Done, Update

_CPU_SPEED, _GPU_SPEED = 5e10, 5e11
"""Multiplications a second that the first micro-steps are sized for; after them what was measured counts."""


class GRPOTrainer:
    """Implements `core.TrainingWork`. Device thread only, but for `bytes_held`.

    The size of an update's micro-steps is fixed from its start: by the end of the update before, from all that was
    measured until then. It is part of the policy's state, so a restored policy makes the same next update to the bit.

    Attributes:
        bytes_held: of open policies and optimizer states; of gradients and a micro-step's activations while updates
            wait. Any thread may read it.
    """

    def __init__(self, model: TrainableModel, settings: TrainerSettings) -> None:
        self.model = model
        self.settings = settings
        self.bytes_held = 0
        self._forwards = Forwards(model, settings)
        reference = bool(settings.loss.kl_coef)
        cost = TokenCost.of(model.trunk_numbers, model.head_numbers, model.checkpoint_layers, reference)
        self._target_size = cost.target_size
        self._pacer = Pacer(cost.trunk / (_CPU_SPEED if on_cpu() else _GPU_SPEED))
        self._seconds = 0.5
        self._footprint = Footprint()
        self._policies: dict[str, Policy] = {}
        self._queue: list[Update] = []
        self._unit: dict[Update, int] = {}

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
    def peak_bytes(self) -> int:
        """The most that MLX has held. Its own counter is reset whenever a unit of training is measured."""
        return self._footprint.peak

    # -- device work -----------------------------------------------------------------------------

    def waits(self) -> bool:
        return bool(self._queue)

    def pace(self, seconds: float) -> None:
        """See `core.TrainingWork.pace`. An update under way keeps the size it started with."""
        if seconds == self._seconds or self.settings.micro_batch_tokens is not None:
            return
        self._seconds = seconds
        for policy in self._policies.values():
            if policy.micro_batch_size is not None:
                policy.micro_batch_size = self._pacer.size_within(seconds)

    def advance(self) -> None:
        """One micro-step, or a unit of an update whose micro-steps are all made."""
        started = time.monotonic()
        updates = self._under_way()
        made = next((update for update in updates if not update.portions), None)
        with self._footprint.measured():
            if made is None:
                self._micro_step(updates, started)
            else:
                self._conclude(made)
        self._share_out(time.monotonic() - started)
        outcome = made.outcome() if made is not None and made.finished else None
        self._unit = {}
        if made is not None and outcome is not None:
            self._finish(made, outcome)
        else:
            self._count_bytes()

    def reset(self) -> None:
        """Gives up the updates of the unit that failed; their policies are as before."""
        failed, self._unit = tuple(self._unit), {}
        for update in failed:
            self._queue.remove(update)
        self._count_bytes()
        for update in failed:
            update.fail()

    def _under_way(self) -> list[Update]:
        """The oldest update of each policy, in order of arrival; all started."""
        oldest: dict[Policy, Update] = {}
        for update in self._queue:
            oldest.setdefault(update.policy, update)
        for policy, update in oldest.items():
            if not update.started:
                self._unit = {update: 1}
                fixed = self.settings.micro_batch_tokens
                most = fixed or policy.micro_batch_size or self._pacer.first_size(self._seconds)
                update.start(most, self._target_size)
        return list(oldest.values())

    def _share_out(self, seconds: float) -> None:
        """Of the unit that has ended well, among the updates that were in it."""
        whole = sum(self._unit.values())
        for update, part in self._unit.items():
            update.device_seconds += seconds * part / whole

    def _count_bytes(self) -> None:
        held = sum(policy.nbytes for policy in self._policies.values())
        if self._queue:
            training = {update.policy for update in self._queue}
            held += self._footprint.working + sum(policy.gradient_nbytes for policy in training)
            held += sum(update.policy.nbytes for update in self._queue if update.stepped)  # what a fault brings back
        self.bytes_held = held

    # -- micro-steps -----------------------------------------------------------------------------

    def _micro_step(self, updates: Sequence[Update], started: float) -> None:
        parts = self._take(updates)
        self._unit = {update: portion.size for update, portion in parts}
        self._add_up(parts)
        mx.eval([update.lazy() for update in self._unit])
        self._pacer.observe(sum(self._unit.values()), time.monotonic() - started)

    def _take(self, updates: Sequence[Update]) -> list[tuple[Update, Portion]]:
        room: float = self.settings.micro_batch_tokens or self._pacer.size_within(self._seconds)
        parts: list[tuple[Update, Portion]] = []
        for update in updates:
            portion = update.take(room if parts else math.inf)
            if portion is not None:
                parts.append((update, portion))
                room -= portion.size
        return parts

    def _add_up(self, parts: Sequence[tuple[Update, Portion]]) -> None:
        """Lazy. When it returns nobody else has the gradients, so that MLX adds them in place."""
        shares = [
            Share(
                pack(portion.samples),
                update.policy.params,
                update.policy.scale,
                update.totals.for_rows(portion.samples),
            )
            for update, portion in parts
        ]
        for (update, _), (loss, stats, gradients) in zip(parts, self._forwards.gradients(shares), strict=True):
            update.include(loss, stats, gradients)

    def _scores(self, batch: MicroBatch, params: Params | None, scale: float) -> Scores:
        """Of one micro-batch; None: under the base."""
        spans = None if params is None else [Span(batch.tokens.size, params, scale)]
        (scores,) = self._forwards.scores([batch], spans)
        return scores

    # -- the end of an update --------------------------------------------------------------------

    def _conclude(self, update: Update) -> None:
        """The optimizer's step; then, where it is asked for, how far that moved the policy, portion by portion, and how
        far it was from the base before."""
        settings = self.settings
        self._unit = {update: 1}
        if not update.stepped:
            compare = settings.measure_kl and not settings.loss.kl_coef
            update.step(settings.optimizer.max_grad_norm, settings.measure_step_kl, compare)
        elif update.to_measure:
            self._measure(update, update.to_measure.popleft())
        else:
            self._compare(update, update.to_compare.popleft())

    def _measure(self, update: Update, portion: Portion) -> None:
        """Adds up k3 of the policy before the step against the one after it, over the batch's tokens.

        Logprobs before the step are the sampler's: of the tokens' own distribution.
        """
        batch = pack(portion.samples)
        logp, _ = self._scores(batch, update.policy.params, update.policy.scale)
        change = mx.where(batch.known, batch.padded(logp) - batch.sampling_logprobs, 0.0) * batch.mask
        update.moved((mx.expm1(change) - change).sum())

    def _compare(self, update: Update, portion: Portion) -> None:
        """k3 of the base against the policy that drew the batch, by the sampler's logprobs."""
        batch = pack(portion.samples)
        (reference,) = self._forwards.reference([batch])
        drawn = batch.mask * batch.known
        update.apart((k3(batch.sampling_logprobs, reference) * drawn).sum(), drawn.sum())

    def _finish(self, update: Update, outcome: UpdateOutcome) -> None:
        if not outcome.skipped and self.settings.micro_batch_tokens is None:
            update.policy.micro_batch_size = self._pacer.size_within(self._seconds)
        self._queue.remove(update)
        self._count_bytes()
        update.done(outcome)
