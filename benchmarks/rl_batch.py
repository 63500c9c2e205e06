"""The batch that every update learns: 4 groups of 8 answers of 12 tokens to a prompt of 50, with rewards at random.

Tokens are drawn at random too: what they say changes no time. No two numbers give the same batch.
"""

import random
from itertools import groupby
from typing import Any

from prompts import long_prompt

from mlx_parallm.config import LoRAConfig
from mlx_parallm.core import GivenTrajectory
from mlx_parallm.rl.samples import Sample

GROUPS, GROUP = 4, 8
PROMPT_TOKENS, ANSWER_TOKENS = 50, 12
LORA = LoRAConfig(rank=16, alpha=32.0)
FACTS = {
    "samples": GROUPS * GROUP,
    "group": GROUP,
    "prompt_tokens": PROMPT_TOKENS,
    "answer_tokens": ANSWER_TOKENS,
    "rank": LORA.rank,
    "targets": "all seven linears",
}


def trajectories(number: int, groups: int = GROUPS) -> list[GivenTrajectory]:
    """Batch `number`, or the first `groups` groups of it. What drew the tokens is not known."""
    rng = random.Random(number)
    return [
        GivenTrajectory(
            prompt_ids=tuple(long_prompt(PROMPT_TOKENS, f"prompt {number} {group}")),
            completion_ids=tuple(long_prompt(ANSWER_TOKENS, f"answer {number} {group} {place}")),
            reward=rng.random(),
            group_id=str(group),
        )
        for group in range(groups)
        for place in range(GROUP)
    ]


def body(number: int) -> dict[str, Any]:
    """The same batch for `POST /v1/training/update`."""
    given = [
        {
            "prompt_token_ids": each.prompt_ids,
            "completion_token_ids": each.completion_ids,
            "reward": each.reward,
            "group_id": each.group_id,
        }
        for each in trajectories(number)
    ]
    return {"trajectories": given, "update_inference": True}


def samples(number: int) -> tuple[Sample, ...]:
    """The same batch as a trainer gets it: advantages are rewards less their group's mean."""
    made: list[Sample] = []
    for group, members in groupby(trajectories(number), key=lambda each: each.group_id):
        together = list(members)
        mean = sum(each.reward for each in together) / len(together)
        made += [
            Sample(each.prompt_ids, each.completion_ids, (), each.temperature, each.reward - mean, int(group))
            for each in together
        ]
    return tuple(made)
