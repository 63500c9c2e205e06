"""A game of textarena: each turn of a game is a turn of an episode, and the game's own reward ends it.

uv run --with textarena==0.7.4 --with openai==3.54.0 python examples/protocols/textarena/play.py [URL]
"""

import random
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import textarena
from openai import OpenAI

sys.path.append(str(Path(__file__).parents[1]))
from serving import post, served, show

GAME, TURNS = "GuessTheNumber-v0-train", 3
UPDATES, GAMES_A_STEP, GROUP = 8, 3, 8


def new_game(seed: int) -> textarena.Env:
    """A game, the same for each member of a group: textarena draws the number from Python's own generator."""
    game = textarena.make(GAME, max_turns=TURNS)
    random.seed(seed)
    game.reset(num_players=1, seed=seed)
    return game


def play(client: OpenAI, game: textarena.Env) -> float:
    """Plays to the end, and returns the game's reward: 1 for the right number, less the further off the last guess."""
    messages, seen, done = [], "", False
    while not done:
        _, observation = game.get_observation()
        messages.append({"role": "user", "content": observation.removeprefix(seen).strip() or "Enter your guess."})
        seen = observation
        answer = client.chat.completions.create(model="base-model", messages=messages, max_tokens=6).choices[0].message
        messages.append(answer)
        done, _ = game.step((answer.content or "").strip())
    rewards, _ = game.close()
    return float(rewards[0])


def episode(url: str, group: str, number: int, game: textarena.Env) -> float:
    name = f"{group}-{number}"
    headers = {"X-Group-Id": group, "X-Group-Size": str(GROUP), "X-Episode-Id": name}
    reward = play(OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers), game)
    post(f"{url}/v1/training/feedback", episode_id=name, group_id=group, score=reward)
    return reward


def main() -> None:
    with served() as url, ThreadPoolExecutor(GAMES_A_STEP * GROUP) as pool:
        for step in range(1, UPDATES + 1):
            seeds = range(step * GAMES_A_STEP, (step + 1) * GAMES_A_STEP)
            groups = {seed: uuid.uuid4().hex for seed in seeds}
            running = [
                pool.submit(episode, url, groups[seed], number, new_game(seed))
                for seed in seeds
                for number in range(GROUP)
            ]
            rewards = [one.result() for one in running]
            post(f"{url}/v1/training/update")
            show(step, sum(rewards) / len(rewards))


if __name__ == "__main__":
    main()
