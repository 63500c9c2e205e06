"""Stands for people who like short answers, on a server that learns from thumbs (docs/people.md).

python examples/thumbs.py [BASE_URL]

Each round asks eight questions and gives 32 thumbs, up if the answer ended within 16 tokens.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

THINGS = ["rain", "a lake", "sleep", "a bicycle", "bread", "a volcano", "music", "winter"]


def ask(http: httpx.Client, thing: str) -> int:
    """Asks about a thing, and gives a thumb to each of four answers. Returns the number of thumbs up."""
    question = [{"role": "user", "content": f"What is {thing}? Answer in one short sentence."}]
    body = {"messages": question, "n": 4, "max_tokens": 16, "collect_trajectory": True}
    answer = http.post("chat/completions", json=body).raise_for_status().json()
    up = 0
    for choice, trajectory in zip(answer["choices"], answer["trajectory_ids"], strict=True):
        likes = choice["finish_reason"] == "stop"
        thumb = {"trajectory_id": trajectory, "score": 1 if likes else -1, "user": "cy"}
        http.post("training/feedback", json=thumb).raise_for_status()
        up += likes
    return up


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Gives thumbs until most answers are short. Each round waits for the update that learns from it."""
    with httpx.Client(base_url=url, timeout=600) as http, ThreadPoolExecutor(len(THINGS)) as people:
        for number in range(1, 7):
            made = http.get("training/status").json()["updates_total"]
            up = sum(people.map(lambda thing: ask(http, thing), THINGS))
            print(f"round {number}: {up} thumbs up of 32", flush=True)
            while http.get("training/status").json()["updates_total"] == made:
                time.sleep(1)
            if up > 25:
                break


if __name__ == "__main__":
    main(*sys.argv[1:])
