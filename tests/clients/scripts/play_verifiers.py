"""Plays one episode of an environment of verifiers with given answers, and prints what was asked and the reward.

    python play_verifiers.py ENVIRONMENT ANSWERS

ANSWERS: a JSON list; a text is an answer, and a list [name, arguments] an answer that calls a tool.
"""

import asyncio
import json
import sys

from mlx_parallm.core.requests import FinishReason
from mlx_parallm.core.text import ToolCall
from mlx_parallm.rl.environments import Answer, environment
from mlx_parallm.rl.environments.thread import EnvironmentThread

LIMIT_S = 600


class Client:
    """A `RolloutClient` whose answers are known. Without more of them, it raises."""

    def __init__(self, answers):
        self.answers = iter(answers)
        self.asked = []

    async def ask(self, messages, max_tokens=None, tools=()):
        self.asked.append({"messages": messages, "tools": [tool["function"]["name"] for tool in tools]})
        answer = next(self.answers, None)
        if answer is None:
            raise ValueError("the prompt is too long")
        if isinstance(answer, str):
            return Answer(answer, FinishReason.STOP, (1, 2))
        name, arguments = answer
        return Answer("", FinishReason.STOP, (1, 2), (ToolCall(name, json.dumps(arguments), "call-1"),))


async def main():
    played, client, thread = environment(sys.argv[1]), Client(json.loads(sys.argv[2])), EnvironmentThread()
    task = next(played.tasks(0))
    result = {"first": task.messages, "asked": client.asked}
    try:
        result["reward"] = await thread.run(lambda: played.rollout(client, task), lambda: LIMIT_S)
    except Exception as error:  # noqa: BLE001 - it is what the test asks for
        result["error"] = f"{type(error).__name__}: {error}"
    thread.close()
    print(json.dumps(result))


asyncio.run(main())
