"""Warm-up: the adapter imitates examples of an environment before its first rollout.

A model that never writes the call of a tool gets no reward for it, so rollouts alone cannot teach it. An example is a
whole conversation. Its assistant's messages are imitated (cross_entropy); all other tokens are context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeGuard

from mlx_parallm.core import GivenTrajectory, TextTokenizer
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments import Environment, Message

PASSES = 4
"""How many times each example is trained on."""

AT_A_TIME = 10
"""Examples of one update."""


class ExampleEnvironment(Environment, Protocol):
    """An environment that has examples."""

    def examples(self, seed: int) -> Iterator[Sequence[Message]]:
        """Conversations as they should be, without end: the same for the same seed."""


def has_examples(environment: Environment) -> TypeGuard[ExampleEnvironment]:
    return callable(getattr(environment, "examples", None))


def warm_up_batches(
    environment: Environment, count: int, seed: int, tokenizer: TextTokenizer
) -> list[list[GivenTrajectory]]:
    """What each update of a warm-up with `count` examples learns from.

    Raises:
        ConfigError: the environment has no examples, or one of them cannot be trained on.
    """
    if not has_examples(environment):
        raise ConfigError(
            "--warm-up: the environment has no examples; give it a method examples(seed), or leave it out"
        )
    examples = [example(messages, tokenizer) for messages in islice(environment.examples(seed), count)]
    batches = [examples[start : start + AT_A_TIME] for start in range(0, len(examples), AT_A_TIME)]
    return batches * PASSES


def example(messages: Sequence[Message], tokenizer: TextTokenizer) -> GivenTrajectory:
    """A conversation as training data: each message of the assistant is trained, up to the token that ends it.

    Raises:
        ConfigError: it has no message of the assistant, or the chat template writes its beginning differently when
            more messages follow.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ConfigError("--warm-up: an example of the environment has no message of the assistant; add one")
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    trained: set[int] = set()
    for number in answers:
        before = tokenizer.apply_chat_template(messages[:number])
        after = tokenizer.apply_chat_template(messages[: number + 1], add_generation_prompt=False)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            raise ConfigError(
                "--warm-up: the model's chat template writes earlier messages differently when others follow, so an "
                "example of several turns cannot be trained on; leave --warm-up out"
            )
        ends = (at + 1 for at in range(len(before), len(after)) if whole[at] in tokenizer.eos_token_ids)
        trained.update(range(len(before), next(ends, len(after))))
    start, stop = min(trained), max(trained) + 1
    return GivenTrajectory(
        prompt_ids=tuple(whole[:start]),
        completion_ids=tuple(whole[start:stop]),
        mask=tuple(at in trained for at in range(start, stop)),
    )
