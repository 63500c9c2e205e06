"""An environment of verifiers 0.4 with two turns of the user and no data to download."""

import verifiers.v1 as vf

__all__ = ["Orders", "TwoTurns"]

ORDERS = ("Name a fruit.", "Name an animal.", "Name a city.", "Name a color.")


class OrderTask(vf.Task[vf.TaskData]):
    """Rewarded for short answers."""

    @vf.reward(weight=1.0)
    async def brevity(self, trace: vf.Trace) -> float:
        text = " ".join(str(node.message.content or "") for node in trace.nodes if node.sampled)
        return 1.0 / (1 + len(text.split()))


class OrdersConfig(vf.TasksetConfig):
    """Nothing to set."""


class Orders(vf.Taskset[OrderTask, OrdersConfig]):
    def load(self) -> list[OrderTask]:
        return [OrderTask(vf.TaskData(prompt=order), self.config.task) for order in ORDERS]


class TwoTurnsConfig(vf.EnvConfig):
    """One agent."""

    agent: vf.AgentConfig = vf.AgentConfig()


class TwoTurns(vf.Env[TwoTurnsConfig]):
    async def run(self, task: OrderTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            await chat.turn()
            await chat.turn("Say it again, in other words.")
