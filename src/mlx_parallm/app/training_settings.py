"""Configuration → the settings of the trainer and its loop; what is left to the algorithm is resolved here."""

from __future__ import annotations

import math

from mlx_parallm.config import Config
from mlx_parallm.rl.losses import defaults
from mlx_parallm.rl.settings import (
    Algorithm,
    LoopSettings,
    LoRASettings,
    LossSettings,
    OldLogprobs,
    OptimizerSettings,
    RewardScale,
    Schedule,
    TrainerSettings,
)


def trainer_settings(config: Config, float32: bool) -> TrainerSettings:
    """`float32`: of the base's activations; in lower precisions decode and training round differently."""
    training = config.rl_training
    return TrainerSettings(
        loss=_loss(config, float32),
        optimizer=_optimizer(config),
        lora=LoRASettings(
            rank=config.model.lora_rank,
            alpha=config.model.lora_alpha,
            targets=config.model.lora_target_modules,
            seed=training.seed,
        ),
        micro_batch_tokens=training.micro_batch_tokens,
        checkpoint_layers=training.gradient_checkpointing,
        measure_step_kl=training.gate.kl_bound is not None,
    )


def loop_settings(config: Config) -> LoopSettings:
    training = config.rl_training
    return LoopSettings(
        update_frequency=training.update_frequency,
        buffer_size=training.trajectory_buffer_size,
        scale_rewards=_reward_scale(config),
        max_staleness=training.max_staleness,
        group_timeout_s=training.group_timeout_s,
        feedback_timeout_s=training.feedback_timeout_s,
        imitation_threshold=training.loss.imitation_threshold,
        kl_bound=training.gate.kl_bound,
        checkpoint_interval=config.checkpointing.interval,
        checkpoint_s=60 * config.checkpointing.minutes,
        rollback_drop=training.gate.rollback_drop,
        max_skips=training.max_skips,
    )


def _loss(config: Config, float32: bool) -> LossSettings:
    training, own = config.rl_training, config.rl_training.loss
    algorithm = Algorithm(training.algorithm)
    usual = defaults(algorithm)
    automatic = OldLogprobs.SAMPLER if float32 else OldLogprobs.TRAINER
    return LossSettings(
        algorithm=algorithm,
        clip_low=usual.clip_low if own.clip_low is None else own.clip_low,
        clip_high=usual.clip_high if own.clip_high is None else own.clip_high,
        dual_clip=math.inf if own.dual_clip is None else own.dual_clip,
        kl_coef=own.kl_coef,
        entropy_coef=own.entropy_coef,
        old_logprobs=automatic if own.old_logprobs == "auto" else OldLogprobs(own.old_logprobs),
        mismatch_cap=own.mismatch_cap,
        max_length=training.max_completion_tokens,
    )


def _optimizer(config: Config) -> OptimizerSettings:
    own = config.rl_training.optimizer
    return OptimizerSettings(
        learning_rate=own.learning_rate,
        schedule=Schedule(own.schedule),
        warmup_steps=own.warmup_updates,
        decay_steps=own.decay_updates,
        betas=(own.beta1, own.beta2),
        eps=own.eps,
        weight_decay=own.weight_decay,
        max_grad_norm=own.max_grad_norm,
    )


def _reward_scale(config: Config) -> RewardScale:
    chosen = config.rl_training.loss.scale_rewards
    return defaults(Algorithm(config.rl_training.algorithm)).scale_rewards if chosen is None else RewardScale(chosen)
