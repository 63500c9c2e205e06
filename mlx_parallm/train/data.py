"""Datum: one sequence that an update learns from, and what it learns of each token.

    token_ids       system, user | sampled | tool result | sampled
    loss_weights    0  0  0  0   | 1  1  1 | 0  0  0     | 1  1  1      0: context only
    advantages      .  .  .  .   | a  a  a | .  .  .     | b  b  b      how much better than expected each token was
    sampled                      [   v3   ]              [   v4   ]     by which version, at which temperature

One prompt with one answer is the simplest case (`answered`). Every loss reads data of this kind, and nothing else is
trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlx_parallm.config import OptimizerConfig, ResolvedLoss, ResolvedTraining
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import FinishReason

PLACEHOLDERS = (
    "the log-probabilities of %d samples for %s are 0 at every trained token, as if each token had been certain: give "
    "those under which the tokens were sampled, or none"
)
"""A warning, with the number of samples and the name of what they train."""


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """The tokens [start, stop) of a datum, which one adapter version sampled at one temperature.

    `adapter`: None if it is unknown. `ended`: why sampling stopped there; None if it is unknown.
    """

    start: int
    stop: int
    temperature: float = 1.0
    adapter: AdapterRef | None = None
    ended: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of T tokens to learn from. Per-token fields have T values, or none where they may be empty.

    Attributes:
        token_ids: of the model's tokenizer.
        loss_weights: 0 for tokens that are context only, above 0 for trained ones. The first token is never trained,
            because nothing predicts it.
        advantages: of each trained token; the others do not matter.
        sampling_logprobs: in nats, of the distribution that sampled the token; of trained tokens only. Empty if
            unknown: the trainer's own are used then, as if the version in training had sampled the sequence.
        teacher_logprobs: in nats, of the policy that distillation imitates; of trained tokens only. Empty if there is
            none.
        reference_logprobs: in nats, in place of those of the base model; of trained tokens only. Empty: the trainer
            computes those of the base model where the loss reads them.
        sampled: the sampled tokens, in order. Trained tokens outside of these spans have temperature 1.
        share: the part of its episode, by weight; the data that one episode is split into add up to 1.
        loss_scale: its loss is multiplied by this, but not its KL divergence from the base model and its entropy.
        targets: the token whose logprob is learnt at each position, in place of the token that the sequence has there.
            Empty: the tokens themselves.
        group: data with the same number are compared with each other.
        on_policy: the version in training sampled it.

    Raises:
        ValueError: a field has another number of values, no token is trained, or the first one is.
    """

    token_ids: tuple[int, ...]
    loss_weights: tuple[float, ...]
    advantages: tuple[float, ...]
    sampling_logprobs: tuple[float, ...] = ()
    teacher_logprobs: tuple[float, ...] = ()
    reference_logprobs: tuple[float, ...] = ()
    sampled: tuple[SampledSpan, ...] = ()
    group: int = 0
    on_policy: bool = True
    targets: tuple[int, ...] = ()
    share: float = 1.0
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        counts = {
            "loss_weights": len(self.loss_weights),
            "advantages": len(self.advantages),
            "sampling_logprobs": len(self.sampling_logprobs) or tokens,
            "teacher_logprobs": len(self.teacher_logprobs) or tokens,
            "reference_logprobs": len(self.reference_logprobs) or tokens,
            "targets": len(self.targets) or tokens,
        }
        for name, count in counts.items():
            if count != tokens:
                raise ValueError(f"{name} has {count} values for {tokens} tokens")
        if not any(self.loss_weights) or min(self.loss_weights) < 0:
            raise ValueError("a datum needs a token whose weight is above 0, and none below it")
        if self.loss_weights[0]:
            raise ValueError("the first token of a datum cannot be trained, because nothing predicts it")
        if not 0 < self.share <= 1:
            raise ValueError("a datum is a part of an episode: its share is above 0 and at most 1")

    @property
    def weight(self) -> float:
        """The sum of the weights: the number of trained tokens if all weights are 1."""
        return sum(self.loss_weights)

    @property
    def has_placeholder_logprobs(self) -> bool:
        """Whether the sampling logprobs of its trained tokens, four at least, are all exactly 0. Some clients write 0
        in place of logprobs that they do not have. The policy ratio is then the token's own probability."""
        trained = self.trained()
        return (
            len(trained) > 3 and bool(self.sampling_logprobs) and not any(self.sampling_logprobs[at] for at in trained)
        )

    def trained(self) -> list[int]:
        """The indices of the trained tokens."""
        return [at for at, weight in enumerate(self.loss_weights) if weight]

    def with_teacher(self, logprobs: Sequence[float]) -> Datum:
        """This datum with a teacher's logprobs of its trained tokens, in order."""
        every = [0.0] * len(self.token_ids)
        for at, value in zip(self.trained(), logprobs, strict=True):
            every[at] = value
        return replace(self, teacher_logprobs=tuple(every))

    def temperatures(self) -> list[float]:
        """The temperature of each token, 1 outside of the sampled spans."""
        every = [1.0] * len(self.token_ids)
        for span in self.sampled:
            every[span.start : span.stop] = [span.temperature] * (span.stop - span.start)
        return every


def answered(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    sampling_logprobs: Sequence[float] = (),
    temperature: float = 1.0,
    advantage: float = 0.0,
    group: int = 0,
    on_policy: bool = True,
    adapter: AdapterRef | None = None,
    ended: FinishReason | None = None,
) -> Datum:
    """A datum of one prompt and one answer, all of whose tokens have the same advantage.

    `sampling_logprobs`: one for each token of the answer, or none.
    """
    context, answer = len(prompt_ids), len(completion_ids)
    return Datum(
        (*prompt_ids, *completion_ids),
        (0.0,) * context + (1.0,) * answer,
        (0.0,) * context + (advantage,) * answer,
        (0.0,) * context + tuple(sampling_logprobs) if sampling_logprobs else (),
        sampled=(SampledSpan(context, context + answer, temperature, adapter, ended),),
        group=group,
        on_policy=on_policy,
    )


def mismatched(data: Sequence[Datum]) -> list[Datum]:
    """As many data, each with the prompt of one of these and the answer of one with another prompt: what kto estimates
    a KL divergence from. A prompt is all that comes before the first trained token.

    If more than half of the data have the same prompt, some get an answer to their own prompt. The result does not
    depend on the order of the data.
    """
    ordered = sorted(data, key=lambda each: (_prompt(each), each.token_ids, each.loss_weights, each.temperatures()))
    most = max(Counter(map(_prompt, ordered)).values())
    return [_with_answer(one, other) for one, other in zip(ordered, ordered[most:] + ordered[:most], strict=True)]


def _prompt(datum: Datum) -> tuple[int, ...]:
    return datum.token_ids[: datum.trained()[0]]


def _with_answer(datum: Datum, other: Datum) -> Datum:
    """The prompt of a datum with all that follows the prompt of another one."""
    prompt, start = _prompt(datum), other.trained()[0]
    shift = len(prompt) - start
    return Datum(
        (*prompt, *other.token_ids[start:]),
        (0.0,) * len(prompt) + other.loss_weights[start:],
        (0.0,) * len(prompt) + other.advantages[start:],
        sampled=tuple(
            replace(each, start=max(each.start, start) + shift, stop=each.stop + shift)
            for each in other.sampled
            if each.stop > start
        ),
        group=datum.group,
    )


def check_pairs(data: Sequence[Datum]) -> None:
    """Checks that each group is a chosen answer, whose advantages are positive, and a rejected one.

    Raises:
        ValueError: a group is not such a pair.
    """
    signs: dict[int, list[bool]] = defaultdict(list)
    for datum in data:
        signs[datum.group].append(sum(datum.advantages[at] for at in datum.trained()) > 0)
    for group, chosen in signs.items():
        if sorted(chosen) != [False, True]:
            raise ValueError(
                f"group {group} has {chosen.count(True)} chosen and {chosen.count(False)} rejected samples: a "
                "preference is one of each"
            )


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The settings that shape an update: with the same data, from the same policy, it is the same to the bit."""

    loss: ResolvedLoss
    optimizer: OptimizerConfig
    minibatches: int
    micro_batch_tokens: int

    @classmethod
    def of(cls, config: ResolvedTraining) -> UpdateSettings:
        return cls(config.loss, config.optimizer, config.minibatches, config.micro_batch_tokens)


_LEAST_STEP = 0.01
"""Updates of smaller steps are not made."""


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The data of one optimizer step, and their metrics (reward_mean, staleness, ...).

    `loss`: None is the configured one. `step_scale`: the factor by which the step is multiplied, 0 to 1; below 1 if
    only a part of the batch has a signal. The step itself is scaled, since AdamW makes nearly the same step for
    gradients of any size. `learning_rate`: of this step; None: that of the configured schedule. `settings`: None is the
    configured ones.
    """

    samples: tuple[Datum, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_scale: float = 1.0
    loss: ResolvedLoss | None = None
    learning_rate: float | None = None
    settings: UpdateSettings | None = None

    @property
    def teaches(self) -> bool:
        """Whether an update makes a step that matters: it has samples, and its step scale is at least 0.01."""
        return bool(self.samples) and self.step_scale >= _LEAST_STEP


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The result of one update. `step`: optimizer steps of the policy so far.

    `skipped`: why the policy was left as it was, or "". `metrics`: loss, entropy, ratio_mean, ratio_max,
    clip_fraction, dual_clip_fraction, mismatch_kl, grad_norm, learning_rate, seconds and so on, over all tokens.
    `kl`: KL divergence of the policy before the step from the base model, in nats per token. If it is part of the loss,
    it is over all tokens; else it is an unbiased estimate from a quarter of the micro-batches. `kl_step`: KL divergence
    of the policy before the step from the one after it, an unbiased estimate from a quarter of the samples.
    """

    step: int
    skipped: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
