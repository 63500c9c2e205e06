"""An environment of verifiers 0.4 with two turns: name a thing of some kind in one word, then another one."""

import re

import verifiers.v1 as vf
from one_thing import THINGS

__all__ = ["TwoThings", "TwoThingsEnv"]


class Kind(vf.TaskData):
    kind: str


class NameTwo(vf.Task[Kind]):
    @vf.reward
    async def are_new(self, trace: vf.Trace) -> float:
        """For each of two answers, a quarter if it names a thing that is new, and a quarter divided by its words."""
        left, points = {*THINGS[self.data.kind].split()}, 0.0
        for message in trace.assistant_messages:
            words = re.findall("[a-z]+", (message.content or "").lower())
            found = left & {*words}
            points += bool(found) + 1 / max(len(words), 1)
            left -= found
        return points / 4


class TwoThings(vf.Taskset[NameTwo]):
    def load(self) -> list[NameTwo]:
        return [NameTwo(Kind(prompt=f"Name a {kind}.", kind=kind), self.config.task) for kind in THINGS]


class TwoThingsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TwoThingsEnv(vf.Env[TwoThingsConfig]):
    async def run(self, task: NameTwo, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            await chat.turn()
            await chat.turn(f"Name another {task.data.kind}.")
