"""What one update learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with its advantage.

    `sampling_logprobs`: one for each completion token, fp32 nats; empty: not known. `group`: samples with the same
    number answer the same prompt. `on_policy`: the version that is being trained drew it.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    temperature: float
    advantage: float
    group: int
    on_policy: bool = True

    @property
    def tokens(self) -> int:
        """Prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The samples of one optimizer step, and what is known of them: reward_mean, staleness and so on.

    `step_scale`: what the step is multiplied by, 0 to 1, where less than a whole batch has a signal. Gradients alone
    would not do: AdamW's steps are nearly the same for gradients of any size.
    """

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What one update did. `step`: optimizer steps of the policy so far.

    `skipped`: why nothing was learnt (the policy is as before), or "". `metrics`: loss, entropy, ratio_mean, ratio_max,
    clip_fraction, dual_clip_fraction, mismatch_kl, grad_norm, learning_rate, seconds and so on, over all tokens.
    `kl`: of the policy before the step to the base, nats a token: over all tokens where it is in the loss, else an
    unbiased estimate from a quarter of the micro-batches. `kl_step`: from the policy before the step to the one after
    it, on the same tokens, all of them.
    """

    step: int
    skipped: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
