"""Training: the logprobs and the gradients of a micro-step of the engine's own trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.adapters.weights import AdapterWeights, lora_alpha
from mlx_parallm.config import ModelConfig, OptimizerConfig
from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.inputs import RANK, SCALE, answers
from mlx_parallm.selftest.limits import relative
from mlx_parallm.selftest.plain import Answered, Gradients
from mlx_parallm.selftest.tested import TestedModel
from mlx_parallm.train.context import Params
from mlx_parallm.train.data import Datum, UpdateBatch, UpdateOutcome, answered
from mlx_parallm.train.policy import Policy, PolicySnapshot, PolicyState

_LENGTHS = (6, 11, 3, 8)
_SHARED = 40


class GradientPolicy(Policy):
    """A policy that keeps the gradients of its last update, and does not change."""

    gradients: Gradients

    def stepped(self, gradients: Params, settings: OptimizerConfig, scale: float = 1.0) -> PolicyState:
        """See `Policy.stepped`."""
        self.gradients = {name: np.array(leaf) for name, leaf in tree_flatten(gradients)}
        return self.state


async def policy_of(tested: TestedModel, weights: AdapterWeights) -> GradientPolicy:
    """A policy with these weights."""
    lora = ModelConfig(
        lora_rank=RANK, lora_alpha=lora_alpha(SCALE, RANK), lora_target_modules=weights.targets, lora_rslora=False
    )
    layout, start = tested.trainer.model.layout, PolicySnapshot(weights, {}, 0)
    return await tested.on_device(lambda: GradientPolicy(layout, lora, start=start))


async def update(tested: TestedModel, policy: Policy, batch: Sequence[Answered]) -> UpdateOutcome:
    """An update of the policy by the engine, between its other work."""
    samples = samples_of(batch)
    return await tested.engine.processor.run(lambda: tested.trainer.begin(policy, UpdateBatch(samples)))


def samples_of(batch: Sequence[Answered]) -> tuple[Datum, ...]:
    """The answers as one group, sampled by the policy in training."""
    return tuple(answered(each.prompt, each.tokens, advantage=each.advantage) for each in batch)


async def _logprobs(tested: TestedModel) -> Outcome:
    weights, batch = tested.adapter(seed=130), answers(tested.vocab_size, _LENGTHS, seed=131, shared_prompt=_SHARED)
    policy = await policy_of(tested, weights)
    samples = samples_of(batch)
    found = await tested.engine.processor.run(lambda: tested.trainer.logprobs(policy, samples))
    expected = await tested.plain(lambda plain: [plain.answer_logprobs(each, weights) for each in batch])
    differences = [float(np.abs(np.subtract(*pair)).max()) for pair in zip(found, expected, strict=True)]
    return Outcome.of(differences, tested.rounding.of_logprobs)


async def _gradients(tested: TestedModel, shared_prompt: int = 0) -> Outcome:
    weights = tested.adapter(seed=140)
    batch = answers(tested.vocab_size, _LENGTHS, seed=141, shared_prompt=shared_prompt)
    policy = await policy_of(tested, weights)
    outcome = await update(tested, policy, batch)
    if outcome.skipped:
        return Outcome(0.0, tested.rounding.of_gradients, f"the update was skipped: {outcome.skipped}")
    expected = await tested.plain(lambda plain: plain.gradients(batch, weights))
    return Outcome.of([relative(policy.gradients, expected)], tested.rounding.of_gradients)


async def _shared_prompts(tested: TestedModel) -> Outcome:
    return await _gradients(tested, shared_prompt=_SHARED)


_ADVICE = (
    "Do not train on this device; what is learnt would be wrong. Serving is not concerned. Attach the report to an "
    "issue."
)

LOGPROBS = Check(
    name="training logprobs",
    compared="the trainer's logprobs of answers that share a prompt, with a plain pass over each of them",
    advice=_ADVICE,
    run=_logprobs,
)
GRADIENTS = Check(
    name="training gradients",
    compared="gradients of a micro-step over answers to different prompts, with mx.grad of plain passes",
    advice=_ADVICE,
    run=_gradients,
)
SHARED_PROMPTS = Check(
    name="training, shared prompts",
    compared="gradients of a micro-step that computes a shared prompt once, with mx.grad of plain passes",
    advice=_ADVICE,
    run=_shared_prompts,
)
