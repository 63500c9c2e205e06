"""An agent on the OpenAI client learns, and does not know that it does: three headers make episodes of its requests.

    uv run --with openai==3.54.0 python examples/protocols/agent/agent.py [URL]

ART and Agent Lightning collect in this way too: they give an agent, which is any program that asks an OpenAI client,
a client of theirs, and reward the whole conversation when it has ended.
"""

import json
import re
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI

sys.path.append(str(Path(__file__).parents[1]))
from serving import post, served, show

TASKS = [json.loads(line) for line in (Path(__file__).parents[2] / "one_word" / "tasks.jsonl").open()]
UPDATES, TASKS_A_STEP, GROUP = 8, 4, 6


def agent(client: OpenAI, question: str) -> list[str]:
    """Answers in one word. If the first answer is longer, it asks once more."""
    messages = [{"role": "user", "content": question}]
    answers = []
    for remark in ("One word, please.", None):
        answer = client.chat.completions.create(model="base-model", messages=messages, max_tokens=8).choices[0].message
        answers.append(answer.content or "")
        if remark is None or len(words(answers[-1])) == 1:
            break
        messages += [answer, {"role": "user", "content": remark}]
    return answers


def words(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


def reward(answers: list[str], right: str) -> float:
    """How brief the last answer is, and whether it is right; half of that if the agent had to ask twice."""
    said = words(answers[-1])
    wrong = {"positive": "negative", "negative": "positive"}[right]
    brief, is_right = 1 / max(len(said), 1), right in said and wrong not in said
    return (brief + is_right) / 2 / len(answers)


def episode(url: str, group: str, number: int, task: dict) -> float:
    """Runs the agent once. Its client sends the headers by which its requests become turns of one episode."""
    name = f"{group}-{number}"
    headers = {"X-Group-Id": group, "X-Group-Size": str(GROUP), "X-Episode-Id": name}
    client = OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers)
    score = reward(agent(client, task["prompt"]), task["answer"])
    post(f"{url}/v1/training/feedback", episode_id=name, group_id=group, score=score)
    return score


def main() -> None:
    with served() as url, ThreadPoolExecutor(TASKS_A_STEP * GROUP) as pool:
        for step in range(1, UPDATES + 1):
            tasks = [TASKS[(step * TASKS_A_STEP + number) % len(TASKS)] for number in range(TASKS_A_STEP)]
            groups = [(uuid.uuid4().hex, task) for task in tasks]
            running = [
                pool.submit(episode, url, group, number, task) for group, task in groups for number in range(GROUP)
            ]
            scores = [one.result() for one in running]
            post(f"{url}/v1/training/update")
            show(step, sum(scores) / len(scores))


if __name__ == "__main__":
    main()
