"""Held-out prompts that every new version answers before it goes live."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.core import (
    AdapterRef,
    Collection,
    EngineClient,
    GenerationRequest,
    SamplingParams,
    StopParams,
    TextTokenizer,
    Trajectory,
    WorkClass,
)
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.rl.collecting import CollectingEngine
from mlx_parallm.rl.parts import Scorers
from mlx_parallm.rl.rollouts import finished


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    prompt_ids: tuple[int, ...]
    collection: Collection


class Evaluation:
    """Mean reward of one answer to each prompt, at temperature 1 and with the same seeds for every version.

    Args:
        engine: the plain one: what is answered here is nothing to learn from.
        floor: least mean reward of a version that may go live.
    """

    def __init__(
        self, engine: EngineClient, scorers: Scorers, prompts: Sequence[EvalPrompt], floor: float, max_tokens: int
    ) -> None:
        self._engine = engine
        self._scorers = scorers
        self._prompts = prompts
        self._floor = floor
        self._max_tokens = max_tokens
        self._numbers = itertools.count()

    async def __call__(self, ref: AdapterRef) -> bool:
        """Whether this version, live or not, reaches the floor. Raises what answering or scoring raises."""
        rewards = await asyncio.gather(*(self._reward(ref, seed, prompt) for seed, prompt in enumerate(self._prompts)))
        return sum(rewards) / len(rewards) >= self._floor

    async def _reward(self, ref: AdapterRef, seed: int, prompt: EvalPrompt) -> float:
        answer = _Kept()
        request = GenerationRequest(
            request_id=f"eval-{next(self._numbers)}",
            prompts=(prompt.prompt_ids,),
            sampling=SamplingParams(seed=seed),
            stopping=StopParams(self._max_tokens),
            adapter=ref,
            work_class=WorkClass.TRAINING,
            collection=prompt.collection,
        )
        await finished(CollectingEngine(self._engine, answer), request)
        (reward,) = await self._scorers.score(answer.group)
        return reward


class _Kept:
    """A sink of one answer."""

    group: Sequence[Trajectory] = ()

    def collected(self, group: Sequence[Trajectory]) -> str:
        self.group = group
        return ""

    def lost(self, adapter: AdapterRef, trajectories: int) -> None:
        """The request's own error says it."""


def read_prompts(file: Path, tokenizer: TextTokenizer, check: Callable[[Collection], None]) -> tuple[EvalPrompt, ...]:
    """One request body a line: `messages` or `prompt`, `scoring_function`, `metadata`.

    `check` raises RequestError where a scorer cannot use what a line brings.

    Raises:
        ConfigError: the file cannot be read, or a line cannot be used; the message names it.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"rl_training.gate.eval_prompts: {file} cannot be read: {error}") from error
    prompts = tuple(_prompt(file, at, line, tokenizer, check) for at, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise ConfigError(f"rl_training.gate.eval_prompts: {file} has no prompt")
    return prompts


def _prompt(
    file: Path, at: int, line: str, tokenizer: TextTokenizer, check: Callable[[Collection], None]
) -> EvalPrompt:
    try:
        body = json.loads(line)
        collection = Collection(str(body["scoring_function"]), body.get("metadata") or {})
        check(collection)
        return EvalPrompt(_ids(body, tokenizer), collection)
    except (ValueError, KeyError, TypeError, AttributeError, RequestError) as error:
        raise ConfigError(
            f"rl_training.gate.eval_prompts: line {at} of {file.name} cannot be used ({error!r}); it needs messages or "
            "prompt, scoring_function and the metadata that this scorer reads"
        ) from error


def _ids(body: Mapping[str, Any], tokenizer: TextTokenizer) -> tuple[int, ...]:
    if "messages" in body:
        return tuple(tokenizer.apply_chat_template(body["messages"]))
    return tuple(tokenizer.encode(str(body["prompt"])))
