"""Rollouts as TRL 1.16 asks vLLM for them, a reward function in TRL's form, and updates on rows of tokens.

    uv run python examples/protocols/trl/rollouts.py [URL]

TRL itself keeps the policy in PyTorch. Here the server trains: what TRL's trainer would compute from a batch, the
advantages, is sent with the sampled tokens to `/v1/training/update`.
"""

import json
import re
import sys
from pathlib import Path
from statistics import fmean, pstdev

sys.path.append(str(Path(__file__).parents[1]))
from serving import post, served, show

TASKS = [json.loads(line) for line in (Path(__file__).parents[2] / "one_word" / "tasks.jsonl").open()]
UPDATES, TASKS_A_STEP, GROUP = 8, 4, 6


def one_word(completions: list[str], answer: list[str], **columns: list) -> list[float]:
    """A reward function of TRL: the right word's share of each completion, 0 if the opposite is in it."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        said = re.findall("[a-z]+", completion.lower())
        wrong = {"positive": "negative", "negative": "positive"}[right]
        rewards.append(0.0 if wrong in said else said.count(right) / max(len(said), 1))
    return rewards


def generate(url: str, prompts: list[list[int]]) -> list[dict]:
    """The body of `trl.generation.vllm_client.VLLMClient.generate`. The choices of a prompt follow each other."""
    body = {
        "model": "base-model",
        "prompt": prompts,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "n": GROUP,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 12,
        "logprobs": 0,
    }
    return post(f"{url}/v1/completions", **body)["choices"]


def advantages(rewards: list[float]) -> list[float]:
    """GRPO's: each reward minus the mean of its group, divided by the group's standard deviation."""
    groups = [rewards[start : start + GROUP] for start in range(0, len(rewards), GROUP)]
    return [(reward - fmean(group)) / (pstdev(group) + 1e-4) for group in groups for reward in group]


def row(choice: dict, advantage: float, group: int) -> dict:
    """One row of tokens: TRL's prompt_ids, completion_ids and logprobs, with a mask of what was sampled."""
    prompt, drawn = choice["prompt_token_ids"], choice["token_ids"]
    return {
        "token_ids": prompt + drawn,
        "mask": [0] * len(prompt) + [1] * len(drawn),
        "logprobs": [None] * len(prompt) + choice["logprobs"]["token_logprobs"],
        "advantages": advantage,
        "group_id": str(group),
    }


def main() -> None:
    with served() as url:
        for step in range(1, UPDATES + 1):
            tasks = [TASKS[(step * TASKS_A_STEP + number) % len(TASKS)] for number in range(TASKS_A_STEP)]
            chats = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
            choices = generate(url, [post(f"{url}/tokenize", messages=chat)["tokens"] for chat in chats])
            answers = [task["answer"] for task in tasks for _ in range(GROUP)]
            rewards = one_word(completions=[choice["text"] for choice in choices], answer=answers)
            rows = [
                row(choice, advantage, number // GROUP)
                for number, (choice, advantage) in enumerate(zip(choices, advantages(rewards), strict=True))
            ]
            post(f"{url}/v1/training/update", trajectories=rows)
            show(step, fmean(rewards))


if __name__ == "__main__":
    main()
