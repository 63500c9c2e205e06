"""An environment of verifiers 0.4 with one turn: name a thing of some kind in one word."""

import re

import verifiers.v1 as vf

__all__ = ["OneThing"]

THINGS = {
    "fruit": "apple apricot banana blueberry cherry coconut fig grape kiwi lemon lime mango melon orange peach pear",
    "animal": "ant bear bee bird cat cow deer dog dolphin duck eagle elephant fish fox horse lion monkey rabbit tiger",
    "color": "aqua black blue brown crimson cyan gold gray green indigo magenta orange pink purple red silver violet",
    "city": "amsterdam athens berlin boston cairo chicago delhi dublin istanbul lima london madrid paris rome tokyo",
}


class Kind(vf.TaskData):
    kind: str


class NameOne(vf.Task[Kind]):
    @vf.reward(weight=0.5)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(bool({*self.words(trace)} & {*THINGS[self.data.kind].split()}))

    @vf.reward(weight=0.5)
    async def is_short(self, trace: vf.Trace) -> float:
        return 1 / max(len(self.words(trace)), 1)

    def words(self, trace: vf.Trace) -> list[str]:
        return re.findall("[a-z]+", trace.last_reply.lower())


class OneThing(vf.Taskset[NameOne]):
    def load(self) -> list[NameOne]:
        return [NameOne(Kind(prompt=f"Name a {kind}.", kind=kind), self.config.task) for kind in THINGS]
