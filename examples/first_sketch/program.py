"""Serves and trains one model in one program. The scorer gsm8k needs the extra `math`.

uv run --extra math python examples/first_sketch/program.py [MODEL_DIR_OR_HUB_ID [PORT]]
"""

import asyncio
import sys
from pathlib import Path

from mlx_parallm import LoRAConfig, RLConfig, RLIntegratedServer


async def main(base_model: str | None = None, port: str = "8000") -> None:
    server = RLIntegratedServer(
        base_model=base_model,
        lora_config=LoRAConfig(rank=16, alpha=32),
        rl_config=RLConfig(algorithm="grpo", learning_rate=1e-5, batch_size=32),
        rl_training__environment=str(Path(__file__).with_name("gsm8k.jsonl")),
    )
    await asyncio.gather(server.run_inference(port=int(port)), server.run_training_loop())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
