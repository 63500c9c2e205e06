"""The rig of `rig.py` without its copies of weights and trajectories, which would count as memory; and plain
clients."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.training.batch import LORA
from benchmarks.lib.training.rig import PROMPTS, Rig
from mlx_parallm.app.build import RunningEngine
from mlx_parallm.config import Config, RLConfig, configure
from mlx_parallm.core.requests import GenerationRequest, RequestFailed, SamplingParams, StopParams


def config(model: Path | None, share: float | None = None, batch_size: int = 100, max_staleness: int = 8) -> Config:
    """The configuration of a server that trains. `share` None means the default training time share."""
    rl = RLConfig(batch_size=batch_size, max_staleness=max_staleness)
    shared: dict[str, object] = {} if share is None else {"rl_training__training_time_share": share}
    return configure(model, LORA, rl, **shared)


@asynccontextmanager
async def lean_rig(config: Config, group: int = 1, max_tokens: int = 64) -> AsyncIterator[Rig]:
    """A rig that serves. Training has not begun and holds no memory until it does."""
    engine = RunningEngine(config)
    served = await asyncio.to_thread(engine.start)
    assert served.training is not None
    prompts = [tuple(served.tokenizer.encode(text)) for text in short_prompts(PROMPTS, "serve and train")]
    made = Rig(engine, served, served.training, group, max_tokens, prompts)
    try:
        yield made
    finally:
        await made.training.close()
        await asyncio.to_thread(engine.stop)


@asynccontextmanager
async def clients(made: Rig, selectors: Sequence[str | None]) -> AsyncIterator[None]:
    """Runs one client for each selector while the block runs, each with one request after the other. At the end, waits
    for the last requests."""
    ending = False

    async def client(selector: str | None) -> None:
        while not ending:
            await answer(made, selector)

    async with asyncio.TaskGroup() as group:
        for selector in selectors:
            group.create_task(client(selector))
        yield
        ending = True


async def answer(made: Rig, selector: str | None = None) -> None:
    """Runs one request of `made.max_tokens` tokens at temperature 1 and drops the answer. Raises the request's
    error."""
    number = next(made.requests)
    with made.served.adapters.lease(selector) as adapter:
        request = GenerationRequest(
            request_id=f"r{number}",
            prompts=(made.prompts[number % len(made.prompts)],),
            sampling=SamplingParams(seed=number),
            stopping=StopParams(made.max_tokens, ignore_eos=True),
            adapter=adapter,
        )
        async for event in made.served.engine.generate(request):
            if isinstance(event, RequestFailed):
                raise event.error
