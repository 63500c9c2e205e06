"""The section `rl_training.loss`: the losses, and their settings. The string below a field is its description."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field

from mlx_parallm.config.types import Flag, Number, Section, fields_of, lower


class LossKind(StrEnum):
    """What a loss learns from. It decides how the advantages of its data are made, and which data share a micro-batch.

    POLICY_GRADIENT: the policy's own samples, by their advantages. SFT: answers to imitate. PAIRWISE: a chosen and a
    rejected answer of each group, which share a micro-batch. KTO: answers that are each desirable or undesirable; the
    loss needs an estimate of the policy's KL divergence from the base model before the first gradient.
    """

    POLICY_GRADIENT = "policy_gradient"
    SFT = "sft"
    PAIRWISE = "pairwise"
    KTO = "kto"


class RewardScale(StrEnum):
    """Divisor of centred rewards: the standard deviation of their group, that of the batch, or none."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


class Algorithm(StrEnum):
    """Loss functions of an update, which `train.losses` defines.

    Each has its kind, and the clip bounds and the reward scale that its paper uses.
    """

    kind: LossKind
    clip_low: float
    clip_high: float
    scale_rewards: RewardScale

    def __new__(
        cls,
        name: str,
        kind: LossKind = LossKind.POLICY_GRADIENT,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        scale_rewards: RewardScale = RewardScale.NONE,
    ) -> Algorithm:
        member = str.__new__(cls, name)
        member._value_, member.kind = name, kind
        member.clip_low, member.clip_high, member.scale_rewards = clip_low, clip_high, scale_rewards
        return member

    GRPO = "grpo", LossKind.POLICY_GRADIENT, 0.2, 0.2, RewardScale.GROUP
    BNPO = "bnpo", LossKind.POLICY_GRADIENT, 0.2, 0.2, RewardScale.GROUP
    DAPO = "dapo", LossKind.POLICY_GRADIENT, 0.2, 0.28, RewardScale.GROUP
    DR_GRPO = "dr_grpo", LossKind.POLICY_GRADIENT
    GSPO = "gspo", LossKind.POLICY_GRADIENT, 3e-4, 4e-4, RewardScale.GROUP
    # CISPO has no lower bound. Its paper gives no upper bound; 1 + 4 is ScaleRL's (arXiv 2510.13786).
    CISPO = "cispo", LossKind.POLICY_GRADIENT, 1.0, 4.0, RewardScale.GROUP
    PPO = "ppo", LossKind.POLICY_GRADIENT, 0.2, 0.2, RewardScale.GROUP
    IMPORTANCE_SAMPLING = "importance_sampling", LossKind.POLICY_GRADIENT, 0.2, 0.2, RewardScale.GROUP
    DPO = "dpo", LossKind.PAIRWISE
    KTO = "kto", LossKind.KTO
    DISTILLATION = "distillation", LossKind.POLICY_GRADIENT
    CROSS_ENTROPY = "cross_entropy", LossKind.SFT


class OldLogprobs(StrEnum):
    """Logprobs in the denominator of the policy ratio.

    SAMPLER: the logprobs that came with the trajectory, of the sampler's policy μ. TRAINER: for samples of the current
    version, the logprobs that the trainer computes before the update, of its policy π_old. Each token is then weighted
    by min(π_old / μ, `mismatch_cap`), because it was sampled from μ. AUTO is resolved before training starts.
    """

    AUTO = "auto"
    SAMPLER = "sampler"
    TRAINER = "trainer"


class LossConfig(Section):
    """Settings of the loss that `rl_training.algorithm` names."""

    clip_low: Number | None = Field(default=None, ge=0, le=1)
    """The policy ratio of a token is clipped below 1 - clip_low. null means the algorithm's own value."""
    clip_high: Number | None = Field(default=None, ge=0)
    """The policy ratio of a token is clipped above 1 + clip_high. null means the algorithm's own value."""
    dual_clip: Number | None = Field(default=3.0, gt=1)
    """Largest loss of a token with a negative advantage A, as a multiple of |A|. null means no bound. cispo, ppo,
    importance_sampling, distillation, dpo, kto and cross_entropy do not use it.
    """
    scale_rewards: Annotated[RewardScale, BeforeValidator(lower)] | None = None
    """Divide centred rewards by the standard deviation of their group (group), of the batch (batch), or not at all
    (none). null means the algorithm's own choice.
    """
    kl_coef: Annotated[Number, Flag("--kl-coef", "NUMBER")] = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the base model (k3 estimate, nats per token)."""
    entropy_coef: Number = Field(default=0.0, ge=0)
    """Weight of the entropy bonus (nats per token)."""
    old_logprobs: Annotated[OldLogprobs, BeforeValidator(lower)] = OldLogprobs.AUTO
    """Logprobs in the denominator of the policy ratio: those of the sampler (sampler), or those that the trainer
    computes before the update (trainer). auto means sampler if the model computes in float32, and trainer otherwise.
    """
    mismatch_cap: Number = Field(default=2.0, ge=1)
    """Largest weight of a token when old_logprobs is trainer. The weight is the token's probability by the trainer's
    logprobs divided by its probability by the sampler's.
    """
    ratio_cap: Number = Field(default=10.0, gt=1)
    """ppo, importance_sampling and distillation: a policy ratio above this value counts as this value. Without a cap,
    one token that the sampler found very unlikely would be a whole update.
    """
    preference_beta: Number = Field(default=0.1, gt=0)
    """dpo and kto: how strongly a preference counts against the distance from the base model. The smaller it is, the
    further the policy may move.
    """
    kto_desirable_weight: Number = Field(default=1.0, ge=0)
    """kto: weight of the loss of a desirable answer. If there are fewer desirable answers, raise it accordingly."""
    kto_undesirable_weight: Number = Field(default=1.0, ge=0)
    """kto: weight of the loss of an undesirable answer."""
    mask_truncated: bool = False
    """Learn nothing from answers that the token limit cut off. Their rewards still count in their groups."""
    imitation_threshold: Number = 0.0
    """cross_entropy imitates trajectories whose reward is above this value, and those that come without a reward. For
    kto, a trajectory that is compared with no other one is desirable if its reward is above this value.
    """

    max_share_per_key: Annotated[Number, Flag("--max-share-per-key", "SHARE")] = Field(default=1.0, gt=0, le=1)
    """The data of one API key move the adapter by at most this part of a whole step in each update. What a key has
    beyond that is cut, and goes to no other key. 1 means no limit. Answers to tasks of the server's own have no limit.
    """

    def resolved(self, algorithm: Algorithm, float32: bool, max_completion_tokens: int) -> ResolvedLoss:
        """These settings with values in place of null and auto; see `RLTrainingConfig.resolved`."""
        automatic = OldLogprobs.SAMPLER if float32 else OldLogprobs.TRAINER
        return ResolvedLoss.model_construct(
            **{
                **fields_of(self),
                "algorithm": algorithm,
                "clip_low": algorithm.clip_low if self.clip_low is None else self.clip_low,
                "clip_high": algorithm.clip_high if self.clip_high is None else self.clip_high,
                "dual_clip": math.inf if self.dual_clip is None else self.dual_clip,
                "scale_rewards": self.scale_rewards or algorithm.scale_rewards,
                "old_logprobs": automatic if self.old_logprobs is OldLogprobs.AUTO else self.old_logprobs,
                "max_completion_tokens": max_completion_tokens,
            }
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
    def kind(self) -> LossKind:
        return self.algorithm.kind

    @property
    def reads_teacher(self) -> bool:
        """Whether the loss reads the logprobs of a teacher, which take the place of advantages."""
        return self.algorithm is Algorithm.DISTILLATION

    @property
    def reads_advantages(self) -> bool:
        """Whether the loss reads advantages, and not only which answers are better or worse."""
        return self.kind is LossKind.POLICY_GRADIENT and not self.reads_teacher

    @property
    def reads_reference(self) -> bool:
        """Whether the loss reads the logprobs of the base model."""
        return self.kl_coef != 0 or self.kind in (LossKind.PAIRWISE, LossKind.KTO)
