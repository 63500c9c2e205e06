"""The section `rl_training`: how adapters are trained on trajectories. Its settings are declared only here.

The trainer and the training loop read `RLTrainingConfig.resolved(...)`, in which no loss setting is null or auto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.config.types import File, Integer, Number, Section, Text, lower


class Algorithm(StrEnum):
    """Loss functions of an update; `rl.objectives.losses` defines them."""

    GRPO = "grpo"
    BNPO = "bnpo"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    CROSS_ENTROPY = "cross_entropy"


class RewardScale(StrEnum):
    """Divisor of centred rewards: the standard deviation of their group, that of the batch, or none."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


class OldLogprobs(StrEnum):
    """Logprobs in the denominator of the policy ratio.

    SAMPLER: the logprobs that came with the trajectory, of the sampler's policy μ. TRAINER: for samples of the current
    version, the logprobs that the trainer computes before the update, of its policy π_old. Each token is then weighted
    by min(π_old / μ, `mismatch_cap`), because the sampler drew it. AUTO is resolved before training starts.
    """

    AUTO = "auto"
    SAMPLER = "sampler"
    TRAINER = "trainer"


class LearningRateSchedule(StrEnum):
    """How the learning rate changes after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class AlgorithmDefaults:
    """The clip bounds and the reward scale that the paper of an algorithm uses."""

    clip_low: float
    clip_high: float
    scale_rewards: RewardScale


ALGORITHM_DEFAULTS: Mapping[Algorithm, AlgorithmDefaults] = {
    Algorithm.GRPO: AlgorithmDefaults(0.2, 0.2, RewardScale.GROUP),
    Algorithm.BNPO: AlgorithmDefaults(0.2, 0.2, RewardScale.GROUP),
    Algorithm.DAPO: AlgorithmDefaults(0.2, 0.28, RewardScale.GROUP),
    Algorithm.DR_GRPO: AlgorithmDefaults(0.2, 0.2, RewardScale.NONE),
    Algorithm.GSPO: AlgorithmDefaults(3e-4, 4e-4, RewardScale.GROUP),
    # CISPO has no lower bound. Its paper gives no upper bound; 1 + 4 is ScaleRL's (arXiv 2510.13786).
    Algorithm.CISPO: AlgorithmDefaults(1.0, 4.0, RewardScale.GROUP),
    Algorithm.CROSS_ENTROPY: AlgorithmDefaults(0.2, 0.2, RewardScale.NONE),
}


class LossConfig(Section):
    """Settings of the loss that `rl_training.algorithm` names."""

    clip_low: Number | None = Field(
        default=None,
        ge=0,
        le=1,
        description="The policy ratio of a token is clipped below 1 - clip_low; null: the algorithm's own value.",
    )
    clip_high: Number | None = Field(
        default=None,
        ge=0,
        description="The policy ratio of a token is clipped above 1 + clip_high; null: the algorithm's own value.",
    )
    dual_clip: Number | None = Field(
        default=3.0,
        gt=1,
        description="Largest loss of a token with a negative advantage A, as a multiple of |A|, however large its "
        "policy ratio; null: no bound. cispo and cross_entropy do not use it.",
    )
    scale_rewards: Annotated[RewardScale, BeforeValidator(lower)] | None = Field(
        default=None,
        description="Divide centred rewards by the standard deviation of their group (group), of the batch (batch), or "
        "not at all (none); null: the algorithm's own choice.",
    )
    kl_coef: Number = Field(
        default=0.0, ge=0, description="Weight of the KL divergence from the base model (k3 estimate, nats per token)."
    )
    entropy_coef: Number = Field(default=0.0, ge=0, description="Weight of the entropy bonus (nats per token).")
    old_logprobs: Annotated[OldLogprobs, BeforeValidator(lower)] = Field(
        default=OldLogprobs.AUTO,
        description="Logprobs in the denominator of the policy ratio: the sampler's, or the trainer's own before the "
        "update; auto: the sampler's if the model computes in float32, else the trainer's.",
    )
    mismatch_cap: Number = Field(
        default=2.0,
        ge=1,
        description="With the trainer's old_logprobs each token is weighted by the ratio of its probability there to "
        "the sampler's; this is the largest weight.",
    )
    imitation_threshold: Number = Field(
        default=0.0,
        description="cross_entropy imitates trajectories with a reward above this, and those that come without a "
        "reward.",
    )


class ResolvedLoss(LossConfig):
    """A loss in which every setting has a value: none is null or auto.

    `dual_clip` is infinite if there is no bound. `max_completion_tokens` is the key of that name of `rl_training`.
    """

    algorithm: Algorithm
    clip_low: float
    clip_high: float
    dual_clip: float
    scale_rewards: RewardScale
    max_completion_tokens: int

    @property
    def imitates(self) -> bool:
        """Whether samples are imitated (cross_entropy) and not compared with each other."""
        return self.algorithm is Algorithm.CROSS_ENTROPY


class OptimizerConfig(Section):
    """AdamW with bias correction, in float32."""

    learning_rate: Number = Field(
        default=1e-5,
        gt=0,
        le=1,
        description="Peak learning rate. LoRA needs about ten times that of full fine-tuning, small models more.",
    )
    schedule: Annotated[LearningRateSchedule, BeforeValidator(lower)] = Field(
        default=LearningRateSchedule.CONSTANT,
        description="Learning rate after the warm-up: constant, or falling to 0 (linear or cosine).",
    )
    warmup_updates: Integer = Field(default=0, ge=0, description="Updates over which the learning rate rises from 0.")
    decay_updates: Integer = Field(
        default=1000, ge=1, description="Updates after the warm-up until the learning rate of linear and cosine is 0."
    )
    beta1: Number = Field(default=0.9, ge=0, lt=1, description="Decay of the mean gradient.")
    beta2: Number = Field(default=0.95, ge=0, lt=1, description="Decay of the mean squared gradient.")
    eps: Number = Field(default=1e-8, gt=0, description="Added to the square root of the mean squared gradient.")
    weight_decay: Number = Field(
        default=0.0, ge=0, description="Decoupled weight decay, as a multiple of the learning rate."
    )
    max_grad_norm: Number = Field(default=1.0, gt=0, description="Gradients are scaled down to this global norm.")


class GateConfig(Section):
    """When a new version does not go live, or is rolled back. A version with non-finite weights never goes live."""

    kl_bound: Number | None = Field(
        default=None,
        gt=0,
        description="Largest change of the policy in one update (mean KL divergence of the policy before it from the "
        "one after it, over all trained tokens, in nats per token); an update above it is not published. null: no "
        "bound.",
    )
    eval_prompts: File | None = Field(
        default=None,
        description="JSONL file of held-out prompts that every new version answers before it goes live. Each line is a "
        "request body with messages or prompt, scoring_function and metadata; null: none.",
    )
    eval_floor: Number | None = Field(
        default=None, description="Least mean reward on eval_prompts; a version below it does not go live."
    )
    rollback_drop: Number | None = Field(
        default=0.15,
        gt=0,
        description="Roll back to the best version when the running mean reward falls this far below its best, if the "
        "fall is more than chance (six standard errors); null: never.",
    )

    @model_validator(mode="after")
    def _floor_has_prompts(self) -> Self:
        if (self.eval_prompts is None) != (self.eval_floor is None):
            raise ValueError("eval_prompts and eval_floor need each other; set both or neither")
        return self


class RLTrainingConfig(Section):
    """Training while serving."""

    enabled: bool = Field(
        default=False,
        description="Train adapters on collected trajectories. This key and the modes that train turn each other on.",
    )
    algorithm: Annotated[Algorithm, BeforeValidator(lower)] = Field(
        default=Algorithm.GRPO,
        description="Loss: grpo, bnpo, dapo, dr_grpo, gspo, cispo, or cross_entropy (imitation).",
    )
    update_frequency: Integer = Field(
        default=100,
        ge=1,
        description="Trajectories in one update. Only groups with a signal count: their rewards differ, or come from "
        "feedback. After four times as many trajectories, with and without a signal, an update is made of those there "
        "are, with a smaller step.",
    )
    trajectory_buffer_size: Integer = Field(
        default=1000, ge=1, description="Most trajectories kept for training; beyond it the oldest groups are dropped."
    )
    max_staleness: Integer = Field(
        default=1,
        ge=0,
        description="Most versions published since a trajectory was drawn; older trajectories are dropped.",
    )
    group_timeout_s: Number = Field(
        default=300.0,
        gt=0,
        description="Seconds that a group waits for its scoring function; after that it is trained on the feedback it "
        "got.",
    )
    feedback_timeout_s: Number | None = Field(
        default=None,
        gt=0,
        description="Seconds that trajectories without a scoring function wait for feedback; null: until "
        "trajectory_buffer_size or max_staleness drops them.",
    )
    max_completion_tokens: Integer = Field(
        default=1024,
        ge=1,
        description="Most tokens of a completion in mlx_parallm_train. The loss dr_grpo divides by it.",
    )
    scoring_processes: Integer = Field(
        default=2,
        ge=1,
        le=64,
        description="Processes that run scoring functions. One client's jobs with the same function and metadata use "
        "all but one of them at most.",
    )
    scoring_batch_size: Integer = Field(
        default=32,
        ge=1,
        description="Most trajectories sent to a scoring process at a time; slow scoring functions get fewer.",
    )
    scoring_timeout_s: Number = Field(
        default=30.0,
        gt=0,
        description="Longest time to score a group, in seconds; a group whose scorer hangs is dropped. exact, regex, "
        "json_schema and length are also limited to 1 s of processor time for each sample.",
    )
    trajectory_log: File | None = Field(
        default=None,
        description="JSONL file to which each trajectory is appended, with its reward and what became of it; null: "
        "none.",
    )
    training_time_share: Number | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of device time for updates while there are requests; they get all idle time. null: 0.12, or "
        "0.5 in the mode training_priority.",
    )
    micro_batch_tokens: Integer = Field(
        default=256,
        ge=1,
        description="Prompt and completion tokens in one micro-step of training, but at least one sample. More is "
        "faster and takes more memory. A micro-step is cut between layers to keep to max_decode_stall_ms.",
    )
    gradient_checkpointing: bool = Field(
        default=True, description="Recompute each layer in the backward pass: less memory, a third more time."
    )
    max_skips: Integer = Field(
        default=3,
        ge=1,
        description="Updates skipped in a row (a loss or gradient that is not finite) after which training pauses.",
    )
    seed: Integer = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="Seed of the initial weights of new adapters, and in mlx_parallm_train of tasks and samples.",
    )
    environment: Text | None = Field(
        default=None,
        description="Source of prompts and rewards for mlx_parallm_train, such as reasoning_gym:leg_counting. A server "
        "does not use it.",
    )
    atropos_url: Text | None = Field(
        default=None,
        description="Base URL of an Atropos trajectory API that gives rewards. Not available in this version: refused "
        "if set.",
    )
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    gate: GateConfig = GateConfig()

    @model_validator(mode="after")
    def _buffer_holds_an_update(self) -> Self:
        size, wanted = self.trajectory_buffer_size, self.update_frequency
        if size < wanted:
            raise ValueError(
                f"trajectory_buffer_size {size} is below update_frequency {wanted}, so no update would ever begin; "
                "raise the one or lower the other"
            )
        return self

    def resolved(self, float32: bool) -> ResolvedTraining:
        """These settings with values in place of null and auto in the loss.

        Args:
            float32: whether the base model computes in float32. In lower precisions decode and training round
                differently, so `old_logprobs` auto means the trainer's logprobs.
        """
        loss, defaults = self.loss, ALGORITHM_DEFAULTS[self.algorithm]
        automatic = OldLogprobs.SAMPLER if float32 else OldLogprobs.TRAINER
        resolved = ResolvedLoss.model_construct(
            **{
                **_fields(loss),
                "algorithm": self.algorithm,
                "clip_low": defaults.clip_low if loss.clip_low is None else loss.clip_low,
                "clip_high": defaults.clip_high if loss.clip_high is None else loss.clip_high,
                "dual_clip": math.inf if loss.dual_clip is None else loss.dual_clip,
                "scale_rewards": loss.scale_rewards or defaults.scale_rewards,
                "old_logprobs": automatic if loss.old_logprobs is OldLogprobs.AUTO else loss.old_logprobs,
                "max_completion_tokens": self.max_completion_tokens,
            }
        )
        return ResolvedTraining.model_construct(**{**_fields(self), "loss": resolved})


class ResolvedTraining(RLTrainingConfig):
    """The section `rl_training` with a resolved loss: what the trainer and the training loop read."""

    loss: ResolvedLoss


def _fields(section: Section) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields}
