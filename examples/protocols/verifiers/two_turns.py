"""An environment of verifiers 0.4 with two turns and no data to download: name a thing of some kind, then another."""

import re

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcess", "TwoTurns", "TwoTurnsEnv"]

THINGS = {
    "fruit": """
apple apricot banana blueberry cherry coconut fig grape grapefruit guava kiwi lemon lime lychee mango melon nectarine
orange papaya peach pear pineapple plum pomegranate raspberry strawberry tomato watermelon
""",
    "animal": """
ant bear bee bird butterfly camel cat chicken cow deer dog dolphin duck eagle elephant fish fox frog giraffe goat
gorilla hippopotamus horse kangaroo koala leopard lion monkey mouse octopus owl panda penguin pig rabbit rat rhinoceros
shark sheep snake spider squirrel tiger turtle whale wolf zebra
""",
    "color": """
aqua beige black blue brown crimson cyan gold gray green grey indigo lavender lime magenta maroon navy olive orange pink
purple red silver teal turquoise violet white yellow
""",
    "city": """
amsterdam athens barcelona beijing berlin boston cairo chicago copenhagen delhi dubai dublin istanbul lagos lima lisbon
london madrid miami milan moscow mumbai munich nairobi oslo paris prague rome seattle seoul shanghai singapore stockholm
sydney tokyo toronto venice vienna
""",
}


class Kind(vf.TaskData):
    """A question about things of one kind."""

    kind: str


class NameTwo(vf.Task[Kind]):
    """Rewarded for two different things, each named in one word."""

    @vf.reward(weight=1.0)
    async def named(self, trace: vf.Trace) -> float:
        """From 0 to 1: for each answer, a quarter if it has a thing that was not named yet, and a quarter divided by
        the number of its words."""
        new, points = set(THINGS[self.data.kind].split()), 0.0
        for node in trace.nodes:
            words = re.findall("[a-z]+", str(node.message.content or "").lower())
            if node.sampled and words:
                found = new & {*words, *(word.removesuffix("s") for word in words)}
                points += bool(found) + 1 / len(words)
                new -= found
        return points / 4


class TwoTurnsConfig(vf.TasksetConfig):
    """Nothing to set."""


class TwoTurns(vf.Taskset[NameTwo, TwoTurnsConfig]):
    def load(self) -> list[NameTwo]:
        prompts = {kind: f"Name {'an' if kind == 'animal' else 'a'} {kind} in one word." for kind in THINGS}
        return [NameTwo(Kind(prompt=prompt, kind=kind), self.config.task) for kind, prompt in prompts.items()]


class TwoTurnsEnvConfig(vf.EnvConfig):
    """One agent."""

    agent: vf.AgentConfig = vf.AgentConfig()


class TwoTurnsEnv(vf.Env[TwoTurnsEnvConfig]):
    async def run(self, task: NameTwo, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            await chat.turn()
            await chat.turn(f"Name another {task.data.kind} in one word.")


class InProcess(vf.Harness[vf.HarnessConfig]):
    """Asks the model from the process of vf-eval. The harness `null` of verifiers starts a program for each turn, which
    takes a second of a processor's time."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        prompt = data.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            await client.chat.completions.create(model=ctx.model, messages=list(messages))
        return ProgramResult(exit_code=0, stdout="", stderr="")
