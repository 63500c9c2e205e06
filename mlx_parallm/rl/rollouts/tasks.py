"""Which tasks of an environment are held out for evaluations, which are left to train on, and its examples.

A model that never writes the call of a tool gets no reward for it, so rollouts alone cannot teach it. In a warm-up, the
adapter imitates examples of the environment before its first rollout. An example is a whole conversation. Its
assistant's messages are imitated (cross_entropy); all other tokens are context.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, TypeGuard

from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl.environments import Environment, Message, Task

# ---- held-out tasks ------------------------------------------------------------------------------

_SEED = 2**31 - 1
"""Of the held-out tasks of an environment that makes tasks from a seed: the same tasks in every run."""

_LOOKS = 4
"""So many times the wanted number of tasks are looked at, because a file's tasks come again after the last one."""

_MOST_HELD_OUT = 10_000
"""Held-out tasks in a row, after which an environment is taken to have no others."""


def held_out_tasks(environment: Environment, size: int) -> tuple[Task, ...]:
    """`size` tasks with different messages, or fewer if the environment has no more.

    Raises:
        ConfigError: the environment has fewer than two.
    """
    tasks: dict[str, Task] = {}
    for task in itertools.islice(environment.tasks(_SEED), _LOOKS * size):
        tasks.setdefault(_messages_of(task), task)
        if len(tasks) == size:
            break
    if len(tasks) < 2:
        raise ConfigError("rl_training.evaluation.tasks: there must be two different tasks at least; add some")
    return tuple(tasks.values())


def without(tasks: Iterator[Task], held_out: Collection[Task]) -> Iterator[Task]:
    """The tasks whose messages are not those of a held-out task.

    Raises:
        ConfigError: in the iteration, if only held-out tasks come.
    """
    excluded, in_a_row = set(map(_messages_of, held_out)), 0
    for task in tasks:
        in_a_row = in_a_row + 1 if _messages_of(task) in excluded else 0
        if in_a_row > _MOST_HELD_OUT:
            raise ConfigError(
                f"environment: all of its tasks are among the {len(held_out)} that are held out for evaluations; give "
                "it more tasks, or lower --eval-size"
            )
        if not in_a_row:
            yield task


def _messages_of(task: Task) -> str:
    return json.dumps([dict(message) for message in task.messages], sort_keys=True, default=str)


# ---- examples -----------------------------------------------------------------------------------

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
    examples = [example(messages, tokenizer) for messages in itertools.islice(environment.examples(seed), count)]
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
