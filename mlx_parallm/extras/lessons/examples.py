"""Examples for a word that the model hardly ever says: its own answers when it is asked for the word.

A word that no answer has earns no reward, so sampling alone cannot teach it. The base model is told to use the word,
and the adapter imitates the answers that do, as answers to the prompt without that demand.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from mlx_parallm.core.requests import Event, GenerationRequest, SamplingParams, SequenceOutput, StopParams, WorkClass
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.extras.lessons.cards import LessonShowing, LessonSpec, RuleKind
from mlx_parallm.extras.lessons.rules import word_pattern
from mlx_parallm.rl.rollouts.answers import Generate, events_of
from mlx_parallm.rl.rollouts.tasks import AT_A_TIME, PASSES

if TYPE_CHECKING:
    from mlx_parallm.rl.service import TrainingService

SAMPLES = 16
"""Answers to each prompt that are sampled."""


def can_be_shown(spec: LessonSpec) -> bool:
    """Whether the rule can be said to the model in words. A judge grades every answer, so it need not be."""
    return spec.rule.kind is RuleKind.WORD


async def examples_of(
    spec: LessonSpec, request: GenerationRequest, generate: Generate, tokenizer: TextTokenizer
) -> list[GivenTrajectory]:
    """Samples answers to all prompts, and keeps those that have the word.

    Args:
        request: how they are sampled; its prompt is replaced, and its id begins theirs.
    """
    has_word = re.compile(word_pattern(spec.rule.text)).search
    found: list[GivenTrajectory] = []
    for number, prompt in enumerate(spec.prompts):
        told = tuple(tokenizer.apply_chat_template(asked_for(spec.rule.text, prompt)))
        asked = replace(request, request_id=f"{request.request_id}-{number}", prompts=(told,))
        plain = tuple(tokenizer.apply_chat_template(prompt))
        answers = await _drawn(generate(asked))
        found += [GivenTrajectory(plain, ids, owner=request.key) for text, ids in answers if has_word(text)]
    return found


def request_for(spec: LessonSpec, name: str, seed: int, key: str) -> GenerationRequest:
    """How examples are sampled: `SAMPLES` for each prompt, by the base model, beside live requests. `key`: the name of
    the API key that gives the lesson."""
    return GenerationRequest(
        f"examples-{name}",
        (),
        SamplingParams(temperature=spec.temperature, seed=seed * 2**32),
        StopParams(spec.max_tokens),
        n=SAMPLES,
        work_class=WorkClass.TRAINING,
        key=key,
    )


def asked_for(word: str, prompt: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The prompt, with the demand for the word at the end of its last message."""
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": f'{last["content"]}\n\nUse the word "{word}" in your answer.'}]


def batches_of(examples: Sequence[GivenTrajectory]) -> Iterator[tuple[LessonShowing, list[GivenTrajectory]]]:
    """What each update of the examples learns from, and its place: all of them several times, as in a warm-up."""
    for time, start in product(range(1, PASSES + 1), range(0, len(examples), AT_A_TIME)):
        batch = [*examples[start : start + AT_A_TIME]]
        yield LessonShowing(len(examples), start + len(batch), time, PASSES), batch


@contextmanager
def imitating(training: TrainingService, adapter: str) -> Iterator[None]:
    """While the block runs, examples are sampled for an adapter and imitated, because its answers earn nothing; so
    these are no plateau. Raises UnknownModelError if it is not trained."""
    plateau = training.loop(adapter).training.plateau
    plateau.restart()
    plateau.rests = True
    try:
        with training.trajectories.samples(adapter):
            yield
    finally:
        plateau.rests = False


async def _drawn(events: AsyncIterator[Event]) -> list[tuple[str, tuple[int, ...]]]:
    """The text and the token ids of each answer."""
    texts = [""] * SAMPLES
    ids: list[tuple[int, ...]] = [()] * SAMPLES
    async for event in events_of(events):
        if isinstance(event, SequenceOutput):
            texts[event.index] += event.text
            ids[event.index] += event.token_ids
    return list(zip(texts, ids, strict=True))
