"""Serves and trains in one process, without HTTP: an adapter learns to give short answers.

python examples/serve_and_train.py [MODEL_DIR_OR_HUB_ID]
"""

import asyncio
import sys
from dataclasses import replace

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer
from mlx_parallm.core.requests import (
    CollectionSpec,
    GenerationRequest,
    RequestFinished,
    SamplingParams,
    SequenceOutput,
    StopParams,
)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def main(*model: str) -> None:
    server = RLIntegratedServer(*model, lora_config=LoRAConfig(rank=8), rl_config=RLConfig(learning_rate=3e-4))
    async with server.session() as served:
        training = served.training
        prompt = tuple(served.tokenizer.apply_chat_template(QUESTION))
        request = GenerationRequest("", (prompt,), SamplingParams(), StopParams(24), n=8, collection=CollectionSpec())
        for step in range(5):
            texts = [""] * request.n
            with served.adapters.lease(None) as adapter:  # the live version; at first the base model
                sampling = SamplingParams(seed=step * request.n)
                answers = replace(request, request_id=f"step {step}", sampling=sampling, adapter=adapter)
                async for event in served.generate(answers):
                    if isinstance(event, SequenceOutput):
                        texts[event.index] += event.text
            assert isinstance(event, RequestFinished), event
            for trajectory, text in zip(event.trajectory_ids, texts, strict=True):
                await training.trajectories.feedback(trajectory, -len(text) / 100)  # the reward
            report = await training.update()
            print(f"{adapter} answers {texts[0]!r}; reward {report.metrics['reward_mean']:.2f}, {report.status}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
