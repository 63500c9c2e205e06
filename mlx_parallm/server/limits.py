"""What one key or client may hold of what all share: tokens and requests a minute, places in the queue, threads, and
the bytes of bodies that arrive.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from mlx_parallm.core.grammar import NewGrammarError
from mlx_parallm.core.machine import seconds_with_sleep
from mlx_parallm.errors import InvalidRequestError, OverloadedError
from mlx_parallm.grammar.trial import CHILDREN
from mlx_parallm.server.access import KeyRing, NamedKey

T = TypeVar("T")

# -- limits of a key -------------------------------------------------------------------------------

Clock = Callable[[], float]
_MINUTE_S = 60.0


@dataclass(slots=True)
class MinuteLimit:
    """A bucket (the token bucket of networks): it holds as much as a minute allows, and is refilled evenly.

    A request takes one of the bucket of requests. Tokens are taken as they are computed: a prompt's at once, those of
    an answer as they are sampled, because nobody knows its length before. So a request may begin while any token is
    left, and what the bucket then owes must be refilled before the next one. `level`: what is left; below 0, what is
    owed.
    """

    per_minute: int
    clock: Clock
    level: float = field(init=False)
    _filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self._filled_at = float(self.per_minute), self.clock()

    def refill(self) -> None:
        now = self.clock()
        self.level = min(self.per_minute, self.level + (now - self._filled_at) * self.per_minute / _MINUTE_S)
        self._filled_at = now

    def take(self, amount: int) -> None:
        self.refill()
        self.level -= amount

    def wait_s(self, needed: float) -> float:
        """Seconds until it holds `needed`."""
        self.refill()
        return max(0.0, needed - self.level) * _MINUTE_S / self.per_minute

    def headers(self, kind: str) -> dict[str, str]:
        """OpenAI's headers about a limit."""
        full_s = self.wait_s(self.per_minute)
        return {
            f"x-ratelimit-limit-{kind}": str(self.per_minute),
            f"x-ratelimit-remaining-{kind}": str(max(0, math.floor(self.level))),
            f"x-ratelimit-reset-{kind}": f"{full_s:.3f}s",
        }


@dataclass(slots=True)
class Account:
    """What one key has used since the server started, and its limits.

    Attributes:
        requests, refused: requests for answers that began, and those that a limit of the key refused.
        running: those under way.
        prompt_tokens, completion_tokens: of all requests. Of the prompts' tokens, `cached_tokens` were not computed,
            because the prefix cache had them.
    """

    key: NamedKey
    clock: Clock
    requests: int = 0
    refused: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    _buckets: dict[str, MinuteLimit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.set_limits(self.key)

    def set_limits(self, key: NamedKey) -> None:
        """Applies the limits of the key as the file has it now. A limit that has not changed keeps its level."""
        self.key = key
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self._buckets = {kind: self._bucket(kind, limit) for kind, limit in limits.items() if limit is not None}

    def _bucket(self, kind: str, limit: int) -> MinuteLimit:
        before = self._buckets.get(kind)
        return before if before is not None and before.per_minute == limit else MinuteLimit(limit, self.clock)

    @property
    def queue_name(self) -> str | None:
        """The name under which the queue counts its places; None for the key of a server that may have only one."""
        return None if self.key.may_be_alone else self.key.name

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request for an answer, which is under way while the block runs.

        Raises:
            OverloadedError: a limit of the key does not allow it now.
        """
        self._check()
        self.requests += 1
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _check(self) -> None:
        most = self.key.max_concurrent
        waits = {kind: bucket.wait_s(1) for kind, bucket in self._buckets.items()}
        kind = max(waits, key=waits.__getitem__, default="")
        if most is not None and self.running >= most:
            fault = OverloadedError(f"This key may have {most} requests under way at a time; wait for one to end.")
        elif waits and waits[kind] > 0:
            limit, seconds = self._buckets[kind].per_minute, math.ceil(waits[kind])
            fault = OverloadedError(f"This key may use {limit} {kind} a minute; try again in {seconds} s.", seconds)
        else:
            return
        self.refused += 1
        raise fault

    def add_prompt(self, tokens: int) -> None:
        """Counts the prompts of a request that begins."""
        self.prompt_tokens += tokens
        self._take_tokens(tokens)

    def add_completion(self, tokens: int) -> None:
        """Counts tokens of an answer."""
        self.completion_tokens += tokens
        self._take_tokens(tokens)

    def _take_tokens(self, tokens: int) -> None:
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's rate-limit headers, for the limits that the key has."""
        return {name: value for kind, bucket in self._buckets.items() for name, value in bucket.headers(kind).items()}


class Accounts:
    """The accounts of all keys. Used on the event loop's thread only.

    Those of keys that are not in the file any more are dropped, so their number is bounded.
    """

    def __init__(self, ring: KeyRing, clock: Clock = seconds_with_sleep) -> None:
        self.ring = ring
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def of(self, key: NamedKey) -> Account:
        """The account of a key that was accepted."""
        account = self._accounts.get(key.name)
        if account is None:
            self._drop_removed()
            account = self._accounts[key.name] = Account(key, self._clock)
        elif account.key is not key:
            account.set_limits(key)
        return account

    def all(self) -> list[Account]:
        """The accounts of all keys that have been used and still exist, by name."""
        self._drop_removed()
        return [self._accounts[name] for name in sorted(self._accounts)]

    def _drop_removed(self) -> None:
        if self.ring.required:
            names = {key.name for key in self.ring.keys}
            self._accounts = {name: account for name, account in self._accounts.items() if name in names}


# -- the queue -------------------------------------------------------------------------------------

PLACES_FOR_EACH_FREE = 4
"""How many places one key may hold for each that stays free: a key alone holds at most four fifths."""


def has_room(limit: int, held: int, own: int | None, wanted: int = 1) -> bool:
    """Whether a key may hold `wanted` more of what all keys share. However many keys flood the server, some of it is
    left for the next one. (These are the dynamic thresholds of Choudhury and Hahne, 1998.)

    Args:
        limit: of all keys together.
        held: by all keys now.
        own: what the key holds of that; None if the server may have no other key, so that nothing is left for others.
    """
    free = limit - held - wanted
    return free >= 0 and (own is None or own + wanted <= max(1, PLACES_FOR_EACH_FREE * free))


class SequenceGate:
    """Limits the number of sequences of all requests under way. A request counts from before it is tokenised to the
    last byte of its answer. Used on the event loop's thread only, so that no other request comes between the check and
    the count.

    One of several keys holds at most its share of the places; see `has_room`.

    Invariant: 0 <= held <= limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._of_keys: Counter[str] = Counter()

    @contextmanager
    def reserve(self, sequences: int, key: str | None = None) -> Iterator[None]:
        """Holds `sequences` places while the block runs.

        Args:
            key: the name of the key whose places they are; None if there are no other keys.

        Raises:
            InvalidRequestError: so many would not be free if nobody else held any.
            OverloadedError: fewer are free, or the key would hold too many of them.
        """
        if not has_room(self.limit, 0, None if key is None else 0, sequences):
            raise InvalidRequestError(
                f"This request needs {sequences} places in the queue, and it has {self.limit}, not all of which one "
                "key may hold. Send fewer prompts at a time, or ask for fewer answers.",
                param="n",
            )
        if self.held + sequences > self.limit:
            raise OverloadedError(
                f"The queue is full: {self.held} of {self.limit} sequences are held and this request needs "
                f"{sequences}. Try again shortly."
            )
        own = None if key is None else self._of_keys[key]
        if not has_room(self.limit, self.held, own, sequences):
            raise OverloadedError(
                f"This key holds {own} of {self.limit} places in the queue, and the others are kept for other keys. "
                "Try again shortly."
            )
        self.held += sequences
        self._of_keys[key or ""] += sequences
        try:
            yield
        finally:
            self.held -= sequences
            self._of_keys[key or ""] -= sequences
            self._of_keys = +self._of_keys  # drops those that hold none


# -- worker threads and arriving bodies ------------------------------------------------------------

SMALL_BYTES = 64 * 1024
"""A body up to this size is small: all work on it takes a few milliseconds."""

_SMALL_THREADS, _LARGE_THREADS = 40, 2
_GRAMMAR_TIMEOUT_S = 10.0
_LARGE_BODIES, _LARGE_BODIES_PER_CLIENT = 16, 8
_LARGE_BODY_BYTES_PER_S = 16 * 2**20
"""Rate at which the large bodies of all clients together are read."""
_MIN_SLEEP_S = 0.01


class PerClientSemaphore:
    """A semaphore with `total` places, of which one client may hold at most `per_client`. Used on the event loop's
    thread only.

    A client waits for one of its own places first, so at most `per_client` of its requests are in the common queue.

    Args:
        timeout_s: longest wait for a place, in seconds.
        busy: message of the error after that wait.
    """

    def __init__(self, total: int, per_client: int, timeout_s: float, busy: str) -> None:
        self._places = asyncio.Semaphore(total)
        self._per_client = per_client
        self._timeout_s = timeout_s
        self._busy = busy
        self._own: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Holds one place while the block runs. Raises OverloadedError if none becomes free in time."""
        own = self._own.setdefault(client, asyncio.Semaphore(self._per_client))
        self._users[client] += 1
        try:
            await self._acquire(own)
            try:
                yield
            finally:
                self._places.release()
                own.release()
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client], self._own[client]

    async def _acquire(self, own: asyncio.Semaphore) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await own.acquire()
                try:
                    await self._places.acquire()
                except BaseException:
                    own.release()
                    raise
        except TimeoutError:
            raise OverloadedError(self._busy) from None


class ArrivingBodies:
    """Bounds the bytes of large bodies from their arrival until they are parsed, and the rate at which they are read. A
    client that sends slowly holds up nobody else, because it holds only the bytes that it has sent. Used on the event
    loop's thread only.

    Args:
        most: bytes of all clients together. One client may hold half of what the others leave free, so there is always
            some room for the next one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self._next_read_at: dict[str, float] = {}  # event loop time, by client

    @contextmanager
    def hold(self, client: str) -> Iterator[Callable[[int], Awaitable[None]]]:
        """Gives a function to be called with the number of bytes of each chunk, and awaited before the next one is
        read. It raises OverloadedError if there is no room for the chunk. The bytes count until the block ends."""
        count = 0

        async def add(size: int) -> None:
            nonlocal count
            others = self._held.total() - self._held[client]
            if self._held[client] + size > (self._most - others) // 2:
                raise OverloadedError("Other large bodies are being read; try again.")
            self._held[client] += size
            count += size
            await self._pace(client, size)

        try:
            yield add
        finally:
            self._held[client] -= count
            if not self._held[client]:
                del self._held[client]
                self._next_read_at.pop(client, None)

    async def _pace(self, client: str, size: int) -> None:
        """Waits, after `size` bytes were read, until more may be read. The clients that wait now share the rate
        equally, so the number of connections of one client does not slow down the others. Without a limit, bodies sent
        over loopback and then refused would take most of a core from the event loop and the device thread."""
        now = asyncio.get_running_loop().time()
        sharing = 1 + sum(at > now for other, at in self._next_read_at.items() if other != client)
        own = max(self._next_read_at.get(client, now), now) + size * sharing / _LARGE_BODY_BYTES_PER_S
        self._next_read_at[client] = own
        if (sleep := own - now) > _MIN_SLEEP_S:
            await asyncio.sleep(sleep)


class Workers:
    """Worker threads of the HTTP server, in three pools, so that one kind of work cannot block another.

    - small: work of a few milliseconds. Most requests need no other pool.
    - large: parsing, rendering, tokenising and writing of long texts, in two threads.
    - grammars: requests whose grammar is new and is compiled, with a limit for each client.

    It also has the limits for large bodies: `arriving` bounds what is read; a request holds a place of
    `large_bodies` while its body, which has arrived, is parsed. Used on the event loop's thread only.

    Args:
        body_timeout_s: longest time in seconds that a large body waits while others are parsed.
        max_body_bytes: the largest body.
    """

    def __init__(self, body_timeout_s: float, max_body_bytes: int) -> None:
        self._small = CapacityLimiter(_SMALL_THREADS)
        self._large = CapacityLimiter(_LARGE_THREADS)
        self._compiling = CapacityLimiter(CHILDREN)
        busy = "Other grammars are being compiled; try again."
        self._grammars = PerClientSemaphore(CHILDREN, max(1, CHILDREN // 2), _GRAMMAR_TIMEOUT_S, busy)
        busy = "Other large bodies are being parsed; try again."
        self.large_bodies = PerClientSemaphore(_LARGE_BODIES, _LARGE_BODIES_PER_CLIENT, body_timeout_s, busy)
        self.arriving = ArrivingBodies(_LARGE_BODIES * max_body_bytes)

    async def run(self, size: int, call: Callable[[], T]) -> T:
        """Runs `call` in a thread of the small or the large pool. `size`: the number of bytes that it works on."""
        return await to_thread.run_sync(call, limiter=self._small if size <= SMALL_BYTES else self._large)

    async def compile(self, client: str, size: int, call: Callable[[bool], T]) -> T:
        """Runs `call(False)`, which needs a grammar and compiles none, and if that raises NewGrammarError `call(True)`,
        which may. So a known grammar does not wait for those that are being compiled. `size`: see `run`.

        Raises:
            OverloadedError: the client waited too long for a place.
        """
        try:
            return await self.run(size, partial(call, False))
        except NewGrammarError:
            async with self._grammars.hold(client):
                return await to_thread.run_sync(call, True, limiter=self._compiling)
