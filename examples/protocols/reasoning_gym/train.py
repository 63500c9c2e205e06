"""A task of reasoning-gym, asked and scored by this program; the server keeps the answers and trains on them.

    uv run --with reasoning-gym==0.1.25 --with openai==3.54.0 python examples/protocols/reasoning_gym/train.py [URL]

Where no program of yours is needed, `mlx_parallm_train --environment reasoning_gym:NAME` does the same by itself.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import reasoning_gym
from openai import OpenAI

sys.path.append(str(Path(__file__).parents[1]))
from serving import post, served, show

TASK = "syllogism"
UPDATES, TASKS_A_STEP, GROUP = 10, 8, 4


def first_word(answer: str) -> str:
    """What is scored of an answer, without punctuation, as reasoning-gym writes its own answers to this task."""
    return "".join(re.findall(r"\w+", answer)[:1])


def main() -> None:
    data = reasoning_gym.create_dataset(TASK, size=UPDATES * TASKS_A_STEP, seed=1)
    with served() as url, ThreadPoolExecutor(TASKS_A_STEP) as pool:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")

        def rollout(entry: dict) -> list[float]:
            """Asks once for a whole group, and rewards each of its answers by its id."""
            messages = [{"role": "user", "content": entry["question"]}]
            answer = client.chat.completions.create(
                model="base-model", messages=messages, n=GROUP, max_tokens=4, extra_body={"collect_trajectory": True}
            )
            scores = [data.score_answer(first_word(choice.message.content or ""), entry) for choice in answer.choices]
            for trajectory_id, score in zip(answer.trajectory_ids, scores, strict=True):
                post(f"{url}/v1/training/feedback", trajectory_id=trajectory_id, score=score)
            return scores

        for step in range(1, UPDATES + 1):
            entries = [data[(step - 1) * TASKS_A_STEP + number] for number in range(TASKS_A_STEP)]
            scores = [score for group in pool.map(rollout, entries) for score in group]
            post(f"{url}/v1/training/update")
            show(step, sum(scores) / len(scores))


if __name__ == "__main__":
    main()
