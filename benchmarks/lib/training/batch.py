"""The batch of every update: 4 groups of 8 completions of 12 tokens, prompts of 50 tokens, random rewards.

The tokens are random too, because their values do not change the time. Each number gives another batch.
"""

import random
from itertools import groupby
from typing import Any

from benchmarks.lib.prompts import long_prompt
from mlx_parallm.config import LoRAConfig
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.train.data import Datum, answered

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
    """The first `groups` groups of batch `number`, without sampling logprobs."""
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
    """The same batch as the body of `POST /v1/training/update`."""
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


def samples(number: int) -> tuple[Datum, ...]:
    """The same batch as the trainer's samples. An advantage is the reward minus the group's mean."""
    made: list[Datum] = []
    for group, members in groupby(trajectories(number), key=lambda each: each.group_id):
        together = list(members)
        mean = sum(each.reward for each in together) / len(together)
        made += [
            answered(each.prompt_ids, each.completion_ids, (), each.temperature, each.reward - mean, int(group))
            for each in together
        ]
    return tuple(made)
