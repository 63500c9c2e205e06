"""The parts of a simulated cluster: requests, a router that handles one thing at a time, and replicas that decode."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from benchmarks.lib.cluster.inputs import Inputs


@dataclass(slots=True, eq=False)
class Request:
    """One request, and the only sequence that it asks for.

    `version` is the one that its adapter's name meant when it was routed. `done` succeeds with whether it was answered.
    """

    tokens: int
    rollout: bool
    sent: float
    done: simpy.Event
    version: int = 0
    drawn: int = 0
    first_token: float | None = None


@dataclass(slots=True)
class Log:
    """What happened, with times in simulated seconds."""

    delivered: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) that reached clients; those of a whole answer when it is complete."""
    first_tokens: list[tuple[float, float]] = field(default_factory=list)
    """(time sent, seconds to the first token) of streamed answers."""
    published: list[float] = field(default_factory=list)
    """Seconds from the end of an update until every node serves its version."""
    staleness: list[int] = field(default_factory=list)
    """Versions between drawing a trajectory and training on it, of each that was trained on."""
    dropped: int = 0
    """Trajectories that were too stale, or the oldest in a full buffer."""
    training_s: float = 0.0
    retried: int = 0
    broken: int = 0


class Server:
    """Handles one thing at a time, first come, first served, such as the event loop of a router."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free_at = 0.0
        self._taken_s = 0.0

    def handle(self, seconds: float) -> simpy.Timeout:
        """An event that occurs when this and all before it have been handled."""
        self._free_at = max(self._env.now, self._free_at) + seconds
        self._taken_s += seconds
        return self._env.timeout(self._free_at - self._env.now)

    @property
    def busy_s(self) -> float:
        """Seconds that it has worked so far."""
        return self._taken_s - max(0.0, self._free_at - self._env.now)


class Replica:
    """A node that answers: rows that get one token in each step, and requests that wait for a row.

    Args:
        on_step: called after each step with its rows.
    """

    def __init__(self, env: simpy.Environment, inputs: Inputs, on_step: Callable[[list[Request]], None]) -> None:
        self.version = 0
        self.member = True
        self.outstanding = 0  # tokens
        self._env, self._inputs, self._on_step = env, inputs, on_step
        self._rows: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._stopped = False
        self._arrived = env.event()
        env.process(self._run())

    def submit(self, request: Request) -> None:
        self._waiting.append(request)
        self.outstanding += request.tokens
        if not self._arrived.triggered:
            self._arrived.succeed()

    def stop(self) -> None:
        """The process ends or stands still: the step in progress never ends."""
        self._stopped = True

    def take_all(self) -> list[Request]:
        """Its requests, which it does not have any more."""
        taken = [*self._rows, *self._waiting]
        self._rows, self._waiting, self.outstanding = [], deque(), 0
        return taken

    def _run(self) -> simpy.events.ProcessGenerator:
        while True:
            if not self._rows and not self._waiting:
                self._arrived = self._env.event()
                yield self._arrived
            prompts_s = self._admit()
            yield self._env.timeout(self._inputs.step(len(self._rows)) + prompts_s)
            if self._stopped:
                return
            self._draw()

    def _admit(self) -> float:
        """Gives waiting requests rows. Returns the seconds that their prompts take."""
        seconds = 0.0
        while self._waiting and len(self._rows) < self._inputs.rows:
            request = self._waiting.popleft()
            self._rows.append(request)
            seconds += self._inputs.prompt_s / (self._inputs.group if request.rollout else 1)
        return seconds

    def _draw(self) -> None:
        for request in self._rows:
            request.drawn += 1
        self.outstanding -= len(self._rows)
        stepped = self._rows
        self._rows = [request for request in stepped if request.drawn < request.tokens]
        self._on_step(stepped)
