"""An environment of verifiers 0.4 with a tool, which alone knows the number that is asked for."""

import verifiers.v1 as vf

__all__ = ["SecretNumbers"]


class Drawer(vf.TaskData):
    number: str


class Safe(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def open_drawer(self, name: str) -> str:
        """Opens a drawer of the safe, and says which number is in it."""
        return str(len(name) * 111)


class FindNumber(vf.Task[Drawer]):
    @vf.reward
    async def is_found(self, trace: vf.Trace) -> float:
        return float(self.data.number in trace.last_reply)


class SecretNumbers(vf.Taskset[FindNumber]):
    def load(self) -> list[FindNumber]:
        names = ("one", "three", "fourth")
        return [
            FindNumber(Drawer(prompt=f"Which number is in the drawer {name}?", number=str(len(name) * 111)))
            for name in names
        ]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Safe(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Safe.run()
