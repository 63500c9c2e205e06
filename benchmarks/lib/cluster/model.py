"""The simulated cluster: cells of replicas behind a router each, and a trainer that publishes to all of them."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import simpy

from benchmarks.lib.cluster.inputs import Inputs
from benchmarks.lib.cluster.parts import Log, Replica, Request, Server


@dataclass(frozen=True, slots=True)
class Design:
    """How the nodes work together."""

    cell_nodes: int | None = None
    """Nodes behind each router. None: one router for all."""
    holders_pass_on: bool = False
    """Whether nodes that have a version serve its files to others, or all nodes pull them from the head."""


ONE_HEAD = Design()
"""One router, and all nodes pull versions from the head."""


class Cell:
    """A router and its replicas."""

    def __init__(self, env: simpy.Environment, inputs: Inputs, nodes: int, log: Log) -> None:
        self.router = Server(env)
        self.live = 0  # the version that the adapter's name means
        self._env, self._inputs, self._log = env, inputs, log
        self.replicas = [Replica(env, inputs, self._relay) for _ in range(nodes)]

    def route(self, request: Request) -> simpy.events.ProcessGenerator:
        """Sends the request to the holder of its version with the fewest tokens outstanding."""
        yield self.router.handle(self._inputs.router.request_s)
        request.version = self.live
        self._place(request)

    def lose(self, replica: Replica, unseen_s: float) -> simpy.events.ProcessGenerator:
        """The replica stops, which is seen after `unseen_s`. Then its requests go to others, unless a part of the
        answer has been sent."""
        replica.stop()
        yield self._env.timeout(unseen_s)
        replica.member = False
        for request in replica.take_all():
            if request.first_token is not None:
                self._log.broken += 1
                request.done.succeed(False)
            else:
                self._log.retried += 1
                request.drawn = 0
                self._place(request)

    def _place(self, request: Request) -> None:
        holders = (replica for replica in self.replicas if replica.member and replica.version >= request.version)
        min(holders, key=lambda replica: replica.outstanding).submit(request)

    def _relay(self, stepped: list[Request]) -> None:
        """Passes on what a step of a replica has drawn. The replica does not wait for it."""
        streamed = [request for request in stepped if not request.rollout]
        ended = [request for request in stepped if request.drawn == request.tokens]
        sent = self.router.handle(len(streamed) * self._inputs.router.token_s)
        sent.callbacks.append(lambda _: self._deliver(streamed, ended))

    def _deliver(self, streamed: list[Request], ended: list[Request]) -> None:
        now = self._env.now
        whole = sum(request.tokens for request in ended if request.rollout)
        self._log.delivered.append((now, len(streamed) + whole))
        for request in streamed:
            if request.first_token is None:
                request.first_token = now
                self._log.first_tokens.append((request.sent, now - request.sent))
        for request in ended:
            request.done.succeed(True)


class Trainer:
    """A node that trains on what rollouts have drawn, and publishes each version.

    One version is published at a time. One that has been replaced by a newer one before its turn is not published.
    """

    def __init__(self, env: simpy.Environment, inputs: Inputs, design: Design, cells: list[Cell], log: Log) -> None:
        self._env, self._inputs, self._design, self._cells, self._log = env, inputs, design, cells, log
        self._drawn_by: deque[int] = deque()  # the version of each trajectory, the oldest trajectory first
        self._made_at = [0.0]  # when each version's update ended
        self._collected, self._updated = env.event(), env.event()
        env.process(self._train())
        env.process(self._publish())

    def collect(self, request: Request) -> None:
        if self._is_stale(request.version):
            self._log.dropped += 1
            return
        self._drawn_by.append(request.version)
        if len(self._drawn_by) > self._inputs.buffer:
            self._drawn_by.popleft()
            self._log.dropped += 1
        self._collected.succeed()
        self._collected = self._env.event()

    @property
    def _latest(self) -> int:
        return len(self._made_at) - 1

    def _train(self) -> simpy.events.ProcessGenerator:
        while True:
            while len(self._drawn_by) < self._inputs.update_samples:
                yield self._collected
            used = [self._drawn_by.popleft() for _ in range(self._inputs.update_samples)]
            self._log.staleness += [self._latest - version for version in used]
            yield self._env.timeout(self._inputs.update_s)
            self._log.training_s += self._inputs.update_s
            self._made_at.append(self._env.now)
            self._drop_stale()
            self._updated.succeed()
            self._updated = self._env.event()

    def _drop_stale(self) -> None:
        fresh = deque(version for version in self._drawn_by if not self._is_stale(version))
        self._log.dropped += len(self._drawn_by) - len(fresh)
        self._drawn_by = fresh

    def _is_stale(self, version: int) -> bool:
        return self._latest - version > self._inputs.max_staleness

    def _publish(self) -> simpy.events.ProcessGenerator:
        published = 0
        while True:
            if published == self._latest:
                yield self._updated
            published = self._latest
            yield self._env.timeout(self._transfer_s + self._inputs.registry_s)  # the upload, then the staged entry
            yield from self._fan_out(published)
            yield self._env.timeout(self._inputs.registry_s)  # the live entry
            for cell in self._cells:
                cell.live = published
            self._log.published.append(self._env.now - self._made_at[published])

    def _fan_out(self, version: int) -> simpy.events.ProcessGenerator:
        """Ends when every member holds the version."""
        sources = simpy.Store(self._env)
        sources.put("head")
        members = [replica for cell in self._cells for replica in cell.replicas if replica.member]
        yield self._env.all_of([self._env.process(self._pull(node, version, sources)) for node in members])

    def _pull(self, node: Replica, version: int, sources: simpy.Store) -> simpy.events.ProcessGenerator:
        """A source sends to one node at a time."""
        source = yield sources.get()
        yield self._env.timeout(self._transfer_s)
        sources.put(source)
        if self._design.holders_pass_on:
            sources.put("holder")
        yield self._env.timeout(self._inputs.stage_s + self._inputs.registry_s)  # into a slot, then the node's entry
        node.version = version

    @property
    def _transfer_s(self) -> float:
        return self._inputs.adapter_bytes / self._inputs.link_bytes_s


class Cluster:
    """A whole cluster. `nodes` counts those that answer; the trainer is one more."""

    def __init__(self, inputs: Inputs, nodes: int, design: Design = ONE_HEAD, seed: int = 0) -> None:
        self.env = simpy.Environment()
        self.log = Log()
        self._inputs = inputs
        size = min(design.cell_nodes or nodes, nodes)
        sizes = [min(size, nodes - begun) for begun in range(0, nodes, size)]
        self.cells = [Cell(self.env, inputs, count, self.log) for count in sizes]
        self.trainer = Trainer(self.env, inputs, design, self.cells, self.log)
        self._random = random.Random(seed)

    def add_clients(self) -> None:
        """Starts the clients of every node. They never stop."""
        for cell in self.cells:
            for _ in cell.replicas:
                for _ in range(self._inputs.live_clients):
                    self._start(cell, self._lengths(self._inputs.live_tokens), rollout=False)
                for _ in range(self._inputs.rollout_clients):
                    self._start(cell, self._lengths(self._inputs.rollout_tokens), rollout=True)

    def deliver(self, lengths: list[int], clients: int) -> float:
        """Lets `clients` clients of the first cell stream answers of these lengths. Returns the seconds until the last
        one ends."""
        left = iter(lengths)
        started = self.env.now
        self.env.run(self.env.all_of([self._start(self.cells[0], left, rollout=False) for _ in range(clients)]))
        return self.env.now - started

    def run(self, until: float) -> None:
        self.env.run(until)

    def lose_one(self, at: float, unseen_s: float) -> None:
        """The first replica stops at the time `at`, which is seen `unseen_s` later."""
        cell = self.cells[0]
        self._after(at, lambda: cell.lose(cell.replicas[0], unseen_s))

    def _after(self, at: float, make: Callable[[], simpy.events.ProcessGenerator]) -> None:
        waiting = self.env.timeout(at - self.env.now)
        waiting.callbacks.append(lambda _: self.env.process(make()))

    def _start(self, cell: Cell, lengths: Iterator[int], rollout: bool) -> simpy.Process:
        return self.env.process(self._client(cell, lengths, rollout))

    def _client(self, cell: Cell, lengths: Iterator[int], rollout: bool) -> simpy.events.ProcessGenerator:
        for tokens in lengths:
            request = Request(tokens, rollout, self.env.now, self.env.event())
            yield self.env.process(cell.route(request))
            answered = yield request.done
            if rollout and answered:
                self.trainer.collect(request)

    def _lengths(self, bounds: tuple[int, int]) -> Iterator[int]:
        while True:
            yield self._random.randint(*bounds)
