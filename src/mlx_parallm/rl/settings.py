"""How policies are trained; frozen, and complete before the trainer is built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Algorithm(StrEnum):
    """Loss functions; see `losses`."""

    GRPO = "grpo"
    BNPO = "bnpo"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    CROSS_ENTROPY = "cross_entropy"


class RewardScale(StrEnum):
    """What a group's centred rewards are divided by: its own standard deviation, the batch's, or nothing."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


class OldLogprobs(StrEnum):
    """Whose logprobs the policy ratio is taken against; see `LossSettings`."""

    SAMPLER = "sampler"
    TRAINER = "trainer"


class Schedule(StrEnum):
    """How the learning rate moves after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class LossSettings:
    """One objective. `clip_low`, `clip_high`: the ratio is kept in [1 - clip_low, 1 + clip_high].

    `dual_clip`: a token of negative advantage A costs at most dual_clip |A|, whatever its ratio; infinity: no bound.
    `kl_coef`: weight of the k3 estimate of KL(policy ‖ base). `entropy_coef`: of the entropy, in favour of it.
    `old_logprobs`: SAMPLER takes π_old = μ, the logprobs that came with the trajectory; TRAINER takes the trainer's
    own before the update where the current version drew the trajectory, and corrects for the sampler by
    min(π_old / μ, `mismatch_cap`) a token. `max_length`: L_max of dr_grpo, in tokens.
    """

    algorithm: Algorithm = Algorithm.GRPO
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    old_logprobs: OldLogprobs = OldLogprobs.SAMPLER
    mismatch_cap: float = 2.0
    max_length: int = 1024


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) with bias correction. `warmup_steps`, `decay_steps`: in updates.

    `max_grad_norm`: gradients are scaled down to this global norm.
    """

    learning_rate: float = 1e-5
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    decay_steps: int = 1000
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class LoRASettings:
    """Rank, alpha and targets (last names of linears) of new adapters; `seed` draws their a factors."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """`micro_batch_tokens`: prompt and completion tokens of one micro-step, padding included; one sample at least.
    A prompt counts once for all its samples in it.

    `checkpoint_layers`: recompute each layer in the backward pass instead of keeping its activations.
    `measure_kl`: report KL to the base (`kl`) even where it has no weight in the loss, over a random quarter of the
    micro-batches, for one more forward of each of those.
    `measure_step_kl`: report how far each update moved the policy (`kl_step`), for one more forward of all of it.
    """

    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoRASettings = LoRASettings()
    micro_batch_tokens: int = 256
    checkpoint_layers: bool = True
    measure_kl: bool = True
    measure_step_kl: bool = False


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """When updates are made, and what becomes of them.

    `update_frequency`: trajectories of complete groups with a signal that make an update. `max_staleness`: versions
    published since a trajectory was drawn, at most. `group_timeout_s`: for the scorer of a group.
    `feedback_timeout_s`: for people, where a group has no scorer; None: as long as it is kept. `imitation_threshold`:
    the loss cross_entropy imitates collected samples with a reward above it. `kl_bound`: an update that moves the
    policy further (mean k3 of old against new) is held; None: any. `checkpoint_interval`: updates between two
    checkpoints. `checkpoint_s`: seconds that an update waits for one, at most. `rollback_drop`: fall of the running
    mean reward under its best that brings the best version back; None: never. `max_skips`: updates skipped in a row
    until training pauses.
    """

    update_frequency: int = 100
    buffer_size: int = 1000
    scale_rewards: RewardScale = RewardScale.GROUP
    max_staleness: int = 1
    group_timeout_s: float = 300.0
    feedback_timeout_s: float | None = None
    imitation_threshold: float = 0.0
    kl_bound: float | None = None
    checkpoint_interval: int = 10
    checkpoint_s: float = 300.0
    rollback_drop: float | None = 0.15
    max_skips: int = 3
