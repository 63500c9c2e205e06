"""Examples that are imitated before the first rollout: which of their tokens are trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from configs import loss_config
from rl.rollout_rig import END, Tokenizer

from mlx_parallm.config import Algorithm, LossKind
from mlx_parallm.core.requests import Signal
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments import environment
from mlx_parallm.rl.objectives import prepare
from mlx_parallm.rl.recording import given_groups
from mlx_parallm.rl.rewards import RewardHistory
from mlx_parallm.rl.rollouts.tasks import PASSES, example, warm_up_batches

CONVERSATION = (
    {"role": "user", "content": "2*3?"},
    {"role": "assistant", "content": "calc: 2*3"},
    {"role": "user", "content": "result: 6"},
    {"role": "assistant", "content": "6"},
)


class Tokens(Tokenizer):
    eos_token_ids = frozenset({END})


class Forgetful(Tokens):
    """Leaves out the answers of earlier turns."""

    def apply_chat_template(self, messages, add_generation_prompt=True):
        kept = [m for m in messages[:-1] if m["role"] != "assistant"] + list(messages[-1:])
        return super().apply_chat_template(kept, add_generation_prompt)


def text(ids) -> str:
    return "".join(chr(token) if token != END else "|" for token in ids)


def test_the_assistants_messages_are_trained_up_to_their_ends() -> None:
    made = example(CONVERSATION, Tokens())
    assert text(made.prompt_ids) == "<user>2*3?|\n<assistant>"
    assert text(made.completion_ids) == "calc: 2*3|\n<user>result: 6|\n<assistant>6|"
    trained = [token for token, is_trained in zip(made.completion_ids, made.mask, strict=True) if is_trained]
    assert text(trained) == "calc: 2*3|6|"
    prepared = prepare(
        [replace(group, signal=Signal.CORRECTIONS) for group in given_groups([made])],
        loss_config(Algorithm.GRPO),
        RewardHistory(),
    )
    (sample,) = prepared.batch.samples
    assert prepared.batch.loss is not None
    assert prepared.batch.loss.kind is LossKind.SFT
    trained = [token for token, weight in zip(sample.token_ids, sample.loss_weights, strict=True) if weight]
    assert text(trained) == "calc: 2*3|6|"


def test_every_example_is_in_one_batch_of_each_pass() -> None:
    batches = warm_up_batches(environment("calculator"), 24, 3, Tokens())
    assert [len(batch) for batch in batches] == [10, 10, 4] * PASSES
    first = [made.prompt_ids for batch in batches[:3] for made in batch]
    assert len(set(first)) == 24
    assert first == [made.prompt_ids for batch in batches[3:6] for made in batch]


@pytest.mark.parametrize(
    ("messages", "tokenizer", "message"),
    [
        (CONVERSATION[:1], Tokens(), "no message of the assistant"),
        (CONVERSATION, Forgetful(), "writes earlier messages differently"),
    ],
)
def test_examples_that_cannot_be_trained_on_are_refused(messages, tokenizer, message) -> None:
    with pytest.raises(ConfigError, match=message):
        example(messages, tokenizer)


def test_an_environment_without_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match="--warm-up: the environment has no examples"):
        warm_up_batches(environment("words"), 5, 0, Tokens())


def test_another_reward_leaves_an_environment_its_examples() -> None:
    rewarded = environment("calculator", rewarded=True)
    assert len(warm_up_batches(rewarded, 3, 0, Tokens())[0]) == 3
    with pytest.raises(ConfigError, match="no examples"):
        warm_up_batches(environment("words", rewarded=True), 3, 0, Tokens())
