"""A reinforcement loop with retrain's own helper: it samples over HTTP and makes the updates in PyTorch.

    python loop.py SERVER_URL MODEL_DIR ADAPTER_DIR STEPS ENGINE

The reward of an answer is higher the fewer words it has. Run by `run.py`.
"""

import sys

from retrain.local_train_helper import LocalTrainHelper
from transformers import AutoTokenizer

QUESTIONS = ("What is the capital of France?", "What is the largest planet?")
SAMPLES, TOKENS, LEARNING_RATE = 8, 12, 1e-3


def reward_of(text: str) -> float:
    return 1 / (1 + len(text.split()))


def main(url: str, model: str, adapters: str, steps: int, engine: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    helper = LocalTrainHelper(model, adapters, "cpu", lora_rank=8, engine_type=engine, inference_url=url)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    for step in range(steps):
        helper.checkpoint(f"step-{step}")  # gives the server the weights of the last update
        groups = helper.sample(prompts, SAMPLES, TOKENS, 1.0, 1.0)
        rows, rewards, texts = [], [], []
        for prompt, group in zip(prompts, groups, strict=True):
            said = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in group]
            scores = [reward_of(text) for text in said]
            mean = sum(scores) / len(scores)
            for (ids, logprobs), score in zip(group, scores, strict=True):
                before = [0.0] * len(prompt)
                rows.append((prompt + ids, before + logprobs, before + [score - mean] * len(ids)))
            rewards += scores
            texts += said
        loss = helper.train_step(*map(list, zip(*rows, strict=True)), LEARNING_RATE, 0.0)
        reward = sum(rewards) / len(rewards)
        print(
            f"step {step + 1:2}  reward {reward:.3f} {'#' * round(60 * reward):30} loss {loss:+.3f}  {texts[0]!r}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])
