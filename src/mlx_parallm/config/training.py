"""The section `rl_training`: what is learnt from trajectories, how, and how much at a time."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlx_parallm.config.base import Section
from mlx_parallm.config.types import File, Integer, Number, Text, lower

Algorithm = Annotated[
    Literal["grpo", "bnpo", "dapo", "dr_grpo", "gspo", "cispo", "cross_entropy"], BeforeValidator(lower)
]
RewardScale = Annotated[Literal["group", "batch", "none"], BeforeValidator(lower)]
OldLogprobs = Annotated[Literal["auto", "sampler", "trainer"], BeforeValidator(lower)]
Schedule = Annotated[Literal["constant", "linear", "cosine"], BeforeValidator(lower)]


class LossConfig(Section):
    """What an update minimises, beside the algorithm."""

    clip_low: Number | None = Field(
        default=None,
        ge=0,
        le=1,
        description="A token's policy ratio counts down to 1 - clip_low; null: the algorithm's own value.",
    )
    clip_high: Number | None = Field(
        default=None, ge=0, description="And up to 1 + clip_high; null: the algorithm's own value."
    )
    dual_clip: Number | None = Field(
        default=3.0,
        gt=1,
        description="A token of negative advantage A costs at most dual_clip times |A|, however large its policy "
        "ratio; null: no bound. It plays no part in cispo and cross_entropy.",
    )
    scale_rewards: RewardScale | None = Field(
        default=None,
        description="Centred rewards are divided by the standard deviation of their group, of the batch, or by none; "
        "null: as the algorithm has it.",
    )
    kl_coef: Number = Field(
        default=0.0, ge=0, description="Weight of the KL divergence from the base model (k3 estimate, nats a token)."
    )
    entropy_coef: Number = Field(
        default=0.0, ge=0, description="Weight of the entropy (nats a token), in favour of more of it."
    )
    old_logprobs: OldLogprobs = Field(
        default="auto",
        description="Logprobs that the policy ratio is taken against: the sampler's, or the trainer's own before the "
        "update; auto: the sampler's on a float32 model, else the trainer's.",
    )
    mismatch_cap: Number = Field(
        default=2.0,
        ge=1,
        description="Where old_logprobs are the trainer's, a token weighs its probability there over the sampler's, "
        "this at most.",
    )
    imitation_threshold: Number = Field(
        default=0.0,
        description="cross_entropy imitates trajectories with a reward above this, and those given without a reward.",
    )


class OptimizerConfig(Section):
    """AdamW with bias correction, in float32."""

    learning_rate: Number = Field(
        default=1e-5,
        gt=0,
        le=1,
        description="Peak learning rate. LoRA takes about ten times full fine-tuning's; small models more.",
    )
    schedule: Schedule = Field(
        default="constant",
        description="How the learning rate moves after the warm-up: constant, linear or cosine to 0.",
    )
    warmup_updates: Integer = Field(default=0, ge=0, description="Updates over which the learning rate rises from 0.")
    decay_updates: Integer = Field(
        default=1000, ge=1, description="Updates over which linear and cosine fall, after the warm-up."
    )
    beta1: Number = Field(default=0.9, ge=0, lt=1, description="Decay of the mean gradient.")
    beta2: Number = Field(default=0.95, ge=0, lt=1, description="Decay of the mean squared gradient.")
    eps: Number = Field(default=1e-8, gt=0, description="Added to the root of the mean squared gradient.")
    weight_decay: Number = Field(
        default=0.0, ge=0, description="Decoupled weight decay, a multiple of the learning rate."
    )
    max_grad_norm: Number = Field(
        default=1.0, gt=0, description="Gradients are scaled down to this norm, over all tensors together."
    )


class GateConfig(Section):
    """What keeps a version from going live, or takes it back; non-finite ones never go live."""

    kl_bound: Number | None = Field(
        default=None,
        gt=0,
        description="Farthest that one update may move the policy (mean KL of the policy before it against the one "
        "after it, over all trained tokens, nats a token); null: any.",
    )
    eval_prompts: File | None = Field(
        default=None,
        description="JSONL file of held-out prompts, answered by every new version before it goes live: one request "
        "body a line, with messages or prompt, scoring_function and metadata; null: none.",
    )
    eval_floor: Number | None = Field(
        default=None, description="Mean reward on eval_prompts below which a version does not go live."
    )
    rollback_drop: Number | None = Field(
        default=0.15,
        gt=0,
        description="Fall of the running mean reward below its best that brings the best version back, where it is "
        "more than chance (six standard errors); null: never.",
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
        description="Train adapters on collected trajectories. It and the modes that train turn each other on.",
    )
    algorithm: Algorithm = Field(
        default="grpo", description="Loss: grpo, bnpo, dapo, dr_grpo, gspo, cispo, or cross_entropy (imitation)."
    )
    update_frequency: Integer = Field(
        default=100,
        ge=1,
        description="Trajectories that make an update; only groups with a signal count: their rewards differ, or "
        "people gave them. After four times as many trajectories without and with a signal the update is made of what "
        "there is, with a smaller step.",
    )
    trajectory_buffer_size: Integer = Field(
        default=1000, ge=1, description="Most trajectories kept for training; beyond it the oldest groups are dropped."
    )
    max_staleness: Integer = Field(
        default=1, ge=0, description="Versions published since a trajectory was drawn, at most; older ones are dropped."
    )
    group_timeout_s: Number = Field(
        default=300.0,
        gt=0,
        description="Seconds that a group waits for its scoring function; then it makes do with people's feedback.",
    )
    feedback_timeout_s: Number | None = Field(
        default=None,
        gt=0,
        description="Seconds that trajectories without a scoring function wait for feedback; null: as long as they are "
        "kept (trajectory_buffer_size, max_staleness).",
    )
    max_completion_tokens: Integer = Field(
        default=1024,
        ge=1,
        description="Most tokens of a completion that mlx_parallm_train draws; the loss dr_grpo divides by it.",
    )
    scoring_processes: Integer = Field(
        default=2,
        ge=1,
        le=64,
        description="Processes that run scoring functions. The same function with the same metadata, of one client, "
        "holds all but one of them at most.",
    )
    scoring_batch_size: Integer = Field(
        default=32,
        ge=1,
        description="Most trajectories given to a scoring process at a time; slow scoring functions get fewer.",
    )
    scoring_timeout_s: Number = Field(
        default=30.0,
        gt=0,
        description="Seconds that scoring a group may take; a scorer that hangs costs its group. exact, regex, "
        "json_schema and length have 1 s of processor time for each sample besides.",
    )
    trajectory_log: File | None = Field(
        default=None, description="JSONL file to which each trajectory is added, with its reward and fate; null: none."
    )
    training_time_share: Number | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of device time for updates beside requests; of idle time, all. null: 0.12, or 0.5 in the "
        "mode training_priority.",
    )
    micro_batch_tokens: Integer = Field(
        default=256,
        ge=1,
        description="Prompt and completion tokens of one micro-step of training, one sample at least: more is faster "
        "and takes more memory. Layer by layer it is cut to keep to max_decode_stall_ms.",
    )
    gradient_checkpointing: bool = Field(
        default=True, description="Compute each layer again in the backward pass: less memory for a third more time."
    )
    max_skips: Integer = Field(
        default=3,
        ge=1,
        description="Updates skipped in a row (a loss or gradient that is not finite) until training pauses.",
    )
    seed: Integer = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="Draws the starting weights of new adapters; in mlx_parallm_train the tasks and samples too.",
    )
    environment: Text | None = Field(
        default=None,
        description="What mlx_parallm_train takes prompts and rewards from, such as reasoning_gym:leg_counting; "
        "a server does not use it.",
    )
    atropos_url: Text | None = Field(
        default=None,
        description="Base URL of an Atropos trajectory API that gives rewards. Not in this version: refused when set.",
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
