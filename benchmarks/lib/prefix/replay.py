"""Replays conversations: a chat of several users who share a system prompt, and the loop of an agent.

Each client sends its next message when its last one is answered. The prompt is the conversation so far, with the
answers of the same server; the clients' texts are the same for all servers.
"""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.lib.load import Stream, get
from benchmarks.lib.prefix.sides import THEIRS, Side, ask, rotated
from benchmarks.lib.prefix.texts import Messages, Script, assistant, system, user, words

ANSWER_TOKENS = 16
USERS, TURNS, CHAT_SYSTEM_WORDS, CHAT_MESSAGE_WORDS = 8, 6, 500, 40
QUICK_USERS, QUICK_TURNS = 4, 3
CALLS, FIRST_CALL_WORDS, RESULT_WORDS = 20, 190, 175
QUICK_CALLS = 6
COUNTED = re.compile(r"^[a-z_]*(?<!external_)prefix_cache_(hits|queries)_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Replayed:
    """One server's replays. The lists have one value per repeat; times are in seconds.

    `first_token_s` is the sum over all requests. `cached_tokens` are those that the answers' usage names, and
    `counted_*` what the server's metrics counted meanwhile, if it has such metrics.
    """

    name: str
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    longest_prompt: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    counted_hits: list[float] = field(default_factory=list)
    counted_queries: list[float] = field(default_factory=list)

    def add(self, streams: Sequence[Stream], total_s: float, counted: Mapping[str, float]) -> None:
        self.first_token_s.append(sum(stream.first_token_s for stream in streams))
        self.total_s.append(total_s)
        self.requests.append(len(streams))
        self.prompt_tokens.append(sum(stream.prompt_tokens for stream in streams))
        self.longest_prompt.append(max(stream.prompt_tokens for stream in streams))
        self.cached_tokens.append(sum(stream.cached_tokens for stream in streams))
        if counted:
            self.counted_hits.append(counted["hits"])
            self.counted_queries.append(counted["queries"])

    @property
    def hit_rates(self) -> list[float]:
        return [hits / tokens for hits, tokens in zip(self.cached_tokens, self.prompt_tokens, strict=True)]

    @property
    def counted_hit_rates(self) -> list[float]:
        return [hits / queries for hits, queries in zip(self.counted_hits, self.counted_queries, strict=True)]


def chat(repeat: int, quick: bool) -> list[Script]:
    """The users' messages. All users have one system prompt, and each repeat has its own."""
    users, turns = (QUICK_USERS, QUICK_TURNS) if quick else (USERS, TURNS)
    shared = words(CHAT_SYSTEM_WORDS, f"chat {repeat}")
    return [
        Script(shared, tuple(words(CHAT_MESSAGE_WORDS, f"chat {repeat} {who} {turn}") for turn in range(turns)))
        for who in range(users)
    ]


def agent(repeat: int, quick: bool) -> list[Script]:
    """One conversation with a message of 175 words for each call, as the result of a tool. The prompt of the 20th call
    has about 4,000 tokens."""
    calls = QUICK_CALLS if quick else CALLS
    results = (words(RESULT_WORDS, f"agent {repeat} {call}") for call in range(calls))
    return [Script(words(FIRST_CALL_WORDS, f"agent {repeat}"), tuple(results))]


async def measure(sides: Sequence[Side], replays: Sequence[Sequence[Script]]) -> dict[str, Replayed]:
    """Replays each list of conversations on each server in turn."""
    results = {side.name: Replayed(side.name) for side in sides}
    for repeat, scripts in enumerate(replays):
        for side in rotated(sides, repeat):
            with side.peer.awake():
                await _replay(side, scripts, results[side.name])
            _tell(results[side.name])
    return results


async def _replay(side: Side, scripts: Sequence[Script], result: Replayed) -> None:
    before, started = await _counted(side), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(_converse(side, script)) for script in scripts]
    total_s = time.perf_counter() - started
    counted = {name: value - before[name] for name, value in (await _counted(side)).items()}
    result.add([stream for client in clients for stream in client.result()], total_s, counted)


async def _converse(side: Side, script: Script) -> list[Stream]:
    messages: Messages = [system(script.system)]
    streams = []
    for message in script.messages:
        messages.append(user(message))
        streams.append(await ask(side, list(messages), ANSWER_TOKENS))
        messages.append(assistant(streams[-1].text))
    return streams


async def _counted(side: Side) -> dict[str, float]:
    """The server's counts of prompt tokens looked up (queries) and found (hits); empty if it has no such metrics."""
    if side.name == THEIRS:
        return {}
    metrics = (await get(side.peer.port, "/metrics")).decode()
    return {name: float(value) for name, value in COUNTED.findall(metrics)}


def _tell(result: Replayed) -> None:
    print(
        f"  {result.requests[-1]} requests  {result.name:<22} first tokens {result.first_token_s[-1]:6.1f} s, "
        f"total {result.total_s[-1]:6.1f} s, hit rate {result.hit_rates[-1]:.2f}",
        flush=True,
    )
