"""What each key has used since the server started, and the limits on it.

A limit per minute is a bucket (the token bucket of networks): it holds as much as a minute allows, and is refilled
evenly. A request takes one of the bucket of requests. Tokens are taken as they are computed: a prompt's at once, an
answer's as they are drawn, because nobody knows its length before. So a request may begin while any token is left, and
what the bucket then owes must be refilled before the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlx_parallm.core.machine import seconds_with_sleep
from mlx_parallm.errors import OverloadedError
from mlx_parallm.server.access.keys import KeyRing, NamedKey

Clock = Callable[[], float]
_MINUTE_S = 60.0


@dataclass(slots=True)
class MinuteLimit:
    """A limit per minute. `level`: what is left; below 0, what is owed."""

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
    """One key's usage, and its limits.

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
