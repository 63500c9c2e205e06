"""Gate: decides by metrics, and by answers to held-out prompts, whether a new version goes live."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.core import (
    AdapterRef,
    CollectionSpec,
    EngineClient,
    GenerationRequest,
    SamplingParams,
    SequenceOutput,
    StopParams,
    TextTokenizer,
    WorkClass,
)
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.rl.collect.recorder import TrajectoryRecorder
from mlx_parallm.rl.events import Refusal
from mlx_parallm.rl.rollouts import events_of
from mlx_parallm.rl.scoring.service import ScoringService

Evaluate = Callable[[AdapterRef], Awaitable[bool]]
"""Decides whether a version that is staged, but not live yet, may go live."""

_log = logging.getLogger(__name__)


class Gate:
    """Decides whether a version goes live. It does if all metrics of its update are finite, `kl_step` does not exceed
    `kl_bound` (None: no bound), and `evaluate` (None: no evaluation) agrees."""

    def __init__(self, kl_bound: float | None = None, evaluate: Evaluate | None = None) -> None:
        self._kl_bound = kl_bound
        self._evaluate = evaluate

    def judge(self, metrics: Mapping[str, float]) -> Refusal | None:
        """Checks the metrics of the update. Returns None if they do not prevent the version from going live."""
        if bad := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
            return Refusal("not_finite", f"not finite: {', '.join(bad)}")
        if self._kl_bound is None:
            return None
        kl = metrics.get("kl_step")
        if kl is None:
            return Refusal("kl_bound", "kl_step was not measured, so kl_bound cannot be checked")
        if kl > self._kl_bound:
            return Refusal("kl_bound", f"kl_step {kl:.3g} is above kl_bound {self._kl_bound:g}")
        return None

    @property
    def evaluates(self) -> bool:
        """Whether versions answer held-out prompts before they go live."""
        return self._evaluate is not None

    async def evaluated(self, ref: AdapterRef) -> Refusal | None:
        """Evaluates the version. If the evaluation raises an error, the version is refused."""
        if self._evaluate is None:
            return None
        try:
            passed = await self._evaluate(ref)
        except Exception:  # noqa: BLE001 - whatever failed, the version was not shown to be good
            _log.exception("the evaluation of %s failed", ref)
            return Refusal("evaluation", "the evaluation failed; see the log")
        return None if passed else Refusal("evaluation", "the evaluation was not passed")


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A held-out prompt, and the scorer and metadata that its answer is scored with."""

    prompt_ids: tuple[int, ...]
    collection: CollectionSpec


class Evaluation:
    """Decides by mean reward whether a version may go live.

    The version gives one answer to each held-out prompt, at temperature 1 and with the same seeds for every version.

    Args:
        floor: least mean reward of a version that may go live.
    """

    def __init__(
        self,
        engine: EngineClient,
        scorers: ScoringService,
        prompts: Sequence[EvalPrompt],
        floor: float,
        max_tokens: int,
    ) -> None:
        self._engine = engine
        self._scorers = scorers
        self._prompts = prompts
        self._floor = floor
        self._max_tokens = max_tokens
        self._numbers = itertools.count()

    async def __call__(self, ref: AdapterRef) -> bool:
        """Whether this version, live or not, reaches the floor. Raises any error of generation or scoring."""
        rewards = await asyncio.gather(*(self._reward(ref, seed, prompt) for seed, prompt in enumerate(self._prompts)))
        return sum(rewards) / len(rewards) >= self._floor

    async def _reward(self, ref: AdapterRef, seed: int, prompt: EvalPrompt) -> float:
        request = GenerationRequest(
            request_id=f"eval-{next(self._numbers)}",
            prompts=(prompt.prompt_ids,),
            sampling=SamplingParams(seed=seed),
            stopping=StopParams(self._max_tokens),
            adapter=ref,
            work_class=WorkClass.TRAINING,
            collection=prompt.collection,
        )
        recorder = TrajectoryRecorder(request)
        async for event in events_of(self._engine.generate(request)):
            if isinstance(event, SequenceOutput):
                recorder.add(event)
        (group,) = recorder.groups()
        (reward,) = await self._scorers.score(group)
        return reward


def read_prompts(
    file: Path, tokenizer: TextTokenizer, check: Callable[[CollectionSpec], None]
) -> tuple[EvalPrompt, ...]:
    """Reads a JSONL file of request bodies: `messages` or `prompt`, `scoring_function`, `metadata`.

    `check` raises RequestError if a scorer cannot use the metadata of a line.

    Raises:
        ConfigError: the file cannot be read, or a line cannot be used; the message names it.
    """
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"rl_training.gate.eval_prompts: {file} cannot be read: {error}") from error
    prompts = tuple(_prompt(file, at, line, tokenizer, check) for at, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise ConfigError(f"rl_training.gate.eval_prompts: {file} has no prompt")
    return prompts


def _prompt(
    file: Path, at: int, line: str, tokenizer: TextTokenizer, check: Callable[[CollectionSpec], None]
) -> EvalPrompt:
    try:
        body = json.loads(line)
        collection = CollectionSpec(str(body["scoring_function"]), body.get("metadata") or {})
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
