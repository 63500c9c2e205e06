"""TestedModel: one model in the engine that serves and trains, and beside it as mlx-lm runs it alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np

from mlx_parallm.adapters.weights import AdapterWeights, VersionInfo
from mlx_parallm.app.build import RunningEngine, Served
from mlx_parallm.config import Config, LoRAConfig, configure
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.grammar import Grammar
from mlx_parallm.core.requests import (
    GenerationRequest,
    PromptScored,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
    TokenLogprob,
)
from mlx_parallm.rl.rollouts.answers import events_of
from mlx_parallm.selftest.inputs import RANK, SCALE, random_adapter, random_tokens
from mlx_parallm.selftest.limits import Rounding, measured
from mlx_parallm.selftest.plain import Logprobs, PlainModel
from mlx_parallm.train.trainer import GRPOTrainer

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0.0, top_logprobs=0)
CHUNK = 128
"""Most prompt tokens of a unit of device work, so that prompts of some hundred tokens take several."""
ROWS = 16
_ADAPTERS = 4


@dataclass(slots=True)
class TestedAnswer:
    """What the engine sampled for one prompt.

    `logprobs`: of the tokens, in nats. `times`: when each token came, on `time.perf_counter`'s clock. `prompt`:
    logprobs of the prompt's tokens, if they were asked for. `cached`: prompt tokens from the prefix cache.
    `prefill_s`: from the first unit of device work to the first token.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    prompt: tuple[TokenLogprob | None, ...] = ()
    cached: int = 0
    prefill_s: float = 0.0


class TestedModel:
    """A model in the engine, and as mlx-lm runs it alone.

    Attributes:
        name: for people.
        path: where it is; None is the bundled one.
        rounding: how far its forward passes may differ.
    """

    __test__ = False  # it is no test of pytest's

    def __init__(
        self, name: str, path: str | None, engine: RunningEngine, served: Served, plain: PlainModel, rounding: Rounding
    ) -> None:
        self.name, self.path, self.served, self.rounding = name, path, served, rounding
        self.engine = engine
        self._plain = plain
        self._ids = count()

    # -- the engine ------------------------------------------------------------------------------

    async def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        adapter: AdapterRef = BASE_ADAPTER,
        grammar: Grammar | None = None,
        scored: bool = False,
        on_token: Callable[[TestedAnswer], bool] = lambda answer: True,
    ) -> TestedAnswer:
        """One answer of the engine, which does not end before `max_tokens` unless a grammar ends it.

        Args:
            scored: ask for logprobs of the prompt's tokens too.
            on_token: called with what there is of the answer whenever a token has come. If it returns False, the
                request is aborted.
        """
        stopping = StopParams(max_tokens, ignore_eos=grammar is None)
        request = GenerationRequest(
            f"self-test-{next(self._ids)}",
            (tuple(prompt),),
            sampling,
            stopping,
            adapter=adapter,
            grammar=grammar,
            prompt_logprobs=0 if scored else None,
        )
        answer, events = TestedAnswer(), events_of(self.served.engine.generate(request))
        async for event in events:
            _add(answer, event)
            if isinstance(event, SequenceOutput) and not on_token(answer):
                await events.aclose()
                break
        return answer

    async def on_device(self, call: Callable[[], T]) -> T:
        """What `call` returns on the device thread, between two units of the engine's work."""
        return await self.engine.processor.run(call)

    async def publish(self, name: str, weights: AdapterWeights) -> AdapterRef:
        """Makes a version of an adapter live, as training does."""
        return (await self.served.adapters.publish(name, weights, VersionInfo.of(weights))).ref

    @property
    def trainer(self) -> GRPOTrainer:
        """The engine's own trainer."""
        assert self.served.training is not None  # `opened` turns training on
        return self.served.training.parts.learner.trainer

    # -- the plain model -------------------------------------------------------------------------

    async def plain_logprobs(self, tokens: Sequence[int], adapter: AdapterWeights | None = None) -> Logprobs:
        """See `PlainModel.logprobs`."""
        return await self.on_device(lambda: self._plain.logprobs(tokens, adapter))

    async def plain(self, call: Callable[[PlainModel], T]) -> T:
        """What `call` returns for the plain model."""
        return await self.on_device(lambda: call(self._plain))

    async def difference(
        self, prompt: Sequence[int], answer: TestedAnswer, adapter: AdapterWeights | None = None
    ) -> float:
        """How far the logprobs of a greedy answer are from those of a plain forward pass over the same tokens, in nats.

        A token that is not the best one counts with a tenth of its distance from the best, because two tokens that are
        closer than ten times the rounding may change places.
        """
        rows = (await self.plain_logprobs([*prompt, *answer.tokens[:-1]], adapter))[len(prompt) - 1 :]
        own = rows[np.arange(len(rows)), answer.tokens]
        behind = (rows.max(-1) - own) / 10
        return float(np.maximum(np.abs(own - answer.logprobs), behind).max())

    # -- what is asked ---------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self.served.card.vocab_size

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random tokens."""
        return random_tokens(self.vocab_size, length, seed)

    def adapter(self, seed: int) -> AdapterWeights:
        """A random adapter."""
        return random_adapter(self.trainer.model.layout, seed)


def _add(answer: TestedAnswer, event: object) -> None:
    if isinstance(event, SequenceOutput):
        answer.tokens += event.token_ids
        answer.logprobs += [each.logprob for each in event.logprobs]
        answer.times += [time.perf_counter()] * len(event.token_ids)
        answer.text += event.text
    elif isinstance(event, PromptScored):
        answer.prompt = event.logprobs
    elif isinstance(event, RequestFinished):
        answer.cached = event.cached_tokens
        answer.prefill_s = event.first_token_at - event.started_at


# -- opening -------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(name: str, path: str | None, folder: Path) -> AsyncIterator[TestedModel]:
    """Loads a model, in the engine and beside it.

    Args:
        folder: where the engine may write. It is empty.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or cannot be trained.
    """
    keys = {
        "server__max_batch_size": ROWS,
        "server__max_batched_tokens": CHUNK,
        "adapters__max_loras": _ADAPTERS,
        "adapters__max_lora_rank": RANK,
        "checkpointing__checkpoint_dir": str(folder),
        "rl_training__optimizer__max_grad_norm": 1e9,  # gradients are compared as they are
        "rl_training__loss__kl_coef": 0.0,
    }
    async with started(configure(path, LoRAConfig(RANK, SCALE * RANK), None, **keys)) as (engine, served):
        assert served.training is not None  # `configure` turns training on
        layout, card = served.training.parts.learner.trainer.model.layout, served.card
        plain = await engine.processor.run(lambda: PlainModel(path))
        rounding = await engine.processor.run(lambda: measured(plain, layout, card))
        yield TestedModel(name, path, engine, served, plain, rounding)


@asynccontextmanager
async def started(config: Config) -> AsyncIterator[tuple[RunningEngine, Served]]:
    """An engine, which stops when the block ends, also if the task is cancelled while the model loads.

    Raises:
        ModelError, ConfigError: see `RunningEngine.start`.
    """
    engine = RunningEngine(config)
    try:
        yield engine, await asyncio.to_thread(engine.start)
    finally:
        await asyncio.to_thread(engine.stop)
