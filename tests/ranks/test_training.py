"""Training on several ranks: what travels, and that the ranks together learn what one learns."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from configs import changed, loss_config
from main_job.ranks import rank_environments
from tiny import tiny_model
from trainers import LORA, SETTINGS, learn, leaves, make_policy, make_trainer, samples

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.extras.ranks.operations import Operation, TrainingPass, TrainingStage
from mlx_parallm.extras.ranks.parts import FollowingParts
from mlx_parallm.extras.ranks.tensor_parallel import split_model
from mlx_parallm.extras.ranks.training import FollowingTraining, LeadingTrainableModel
from mlx_parallm.extras.ranks.wire import decode, encode
from mlx_parallm.model.cache_plan import prepare
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.train.trainer import GRPOTrainer

PROGRAM = Path(__file__).with_name("training_program.py")


@dataclass
class Inside:
    """Stands for `Leader`, with a follower in this process, which gets what would be sent."""

    follower: FollowingTraining
    operations: list[Operation] = field(default_factory=list)

    def repeat(self, operation: Operation) -> None:
        self.operations.append(operation)
        match decode(encode(operation)[8:]):
            case TrainingPass() as begun:
                self.follower.begin(begun)
            case TrainingStage(number):
                self.follower.compute(number)

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


def pair_of_ranks() -> tuple[GRPOTrainer, Inside]:
    """Rank 0's trainer and a follower, which both compute the whole model: a group of one rank each."""
    group = mx.distributed.init()
    parts = []
    for _ in range(2):
        model = tiny_model("llama")
        layout = adapter_layout(model)
        split = split_model(model, group)
        bank = AdapterBank(layout, 4, 8, mx.float32, make_group=FollowingParts(group).linear_group(split))
        install_adapters(model, bank)
        parts.append((model, bank, prepare(model), split))
    inside = Inside(FollowingTraining(*parts[1]))
    model, bank, style, split = parts[0]
    trainable = LeadingTrainableModel(model, bank, style, lambda *_: True, split, inside)
    return GRPOTrainer(trainable, settings(), LORA), inside


def settings():
    return changed(SETTINGS, loss=loss_config(kl_coef=0.1), gradient_checkpointing=True)


def test_a_follower_computes_every_stage_and_rank_0_learns_what_one_learns() -> None:
    leading, inside = pair_of_ranks()
    alone, _ = make_trainer(settings())
    policies = [make_policy(trainer, moved=0.05) for trainer in (leading, alone)]
    for trainer, policy in zip((leading, alone), policies, strict=True):
        assert not learn(trainer, policy, samples(8)).skipped
    for name, leaf in leaves(policies[1]).items():
        np.testing.assert_allclose(leaves(policies[0])[name], leaf, atol=1e-5, err_msg=name)
    begun = [each for each in inside.operations if isinstance(each, TrainingPass)]
    layers = len(leading.model.layer_paths)
    assert {len(each.spans) for each in begun} == {0, 1}, "the base, for the KL divergence, and the policy"
    assert sum(isinstance(each, TrainingStage) for each in inside.operations) == sum(
        layers + layers * each.learns for each in begun
    )
    assert not inside.follower._stages, "nothing is kept of a pass that was computed"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "ranks"), [("llama", 2), ("qwen2", 2), ("qwen3", 2), ("quantized", 2), ("llama", 3)]
)
def test_gradients_and_updates_of_several_ranks_are_those_of_one(family: str, ranks: int, tmp_path: Path) -> None:
    """Two ranks have heads of zeros, three have not. Every update was clipped."""
    apart = json.loads(on_ranks(ranks, tmp_path, family))
    print(f"{family} on {ranks} ranks: {apart}")
    assert apart["smallest_norm"] > apart["max_grad_norm"]
    assert max(far for name, far in apart.items() if name.startswith("gradients")) < 2e-5, "of the largest gradient"
    assert apart["learnt"] > 0.1
    assert apart["rewards"] < 1e-4, "of the largest reward"
    assert apart["logprobs"] < 1e-4


def on_ranks(ranks: int, folder: Path, family: str) -> str:
    """What rank 0 prints."""
    command, modules = [sys.executable, str(PROGRAM), family], {"PYTHONPATH": str(PROGRAM.parents[1])}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environment, **modules})
        for environment in rank_environments(ranks, folder)
    ]
    try:
        printed, _ = processes[0].communicate(timeout=250)
        assert [process.wait(30) for process in processes] == [0] * ranks
        return printed
    finally:
        for process in processes:
            process.kill()
            process.communicate()
