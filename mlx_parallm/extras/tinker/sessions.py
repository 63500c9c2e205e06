"""The sessions of Tinker clients, their models, and the sampling sessions in them.

Every id begins with that of its session, which ends with the mark of the key that opened it. So what belongs to whom
is known from the id alone, also of weights that were saved by an earlier process. To other keys, it does not exist.

A model's requests are numbered. They run in the order of their numbers, one at a time, and none runs twice.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.errors import ConflictError, InvalidRequestError, OverloadedError, UnknownModelError, shown
from mlx_parallm.extras.tinker.schema import MAX_NAME, NAME
from mlx_parallm.server.access import NamedKey, Role
from mlx_parallm.server.errors import ExpiredError
from mlx_parallm.server.limits import has_room

MAX_WAITING = 1024
"""Requests of one model that wait for their turn."""
MAX_MODELS, MAX_SAMPLERS = 1024, 4096
"""Models and sampling sessions of one session, those that have ended included."""
_REMEMBERED = 4096
"""Numbers of past requests of a model that are remembered, to tell a repeated request from a wrong one."""
_DIGITS = 12
"""Of the random part of an id, and of the mark of its key, which follows."""
_MODEL_ID = re.compile(r"(tinker-[0-9a-f]{12,24}):train:([0-9]{1,9})")
_PATH = re.compile(rf"tinker://({_MODEL_ID.pattern})/(weights|sampler_weights)/([^/]+)")


def new_id(key: NamedKey) -> str:
    """The id of something that belongs to this key."""
    return f"tinker-{secrets.token_hex(_DIGITS // 2)}{key.mark}"


def is_of(key: NamedKey, any_id: str) -> bool:
    """Whether the key may use what has this id: it made it, or is an admin's. Ids of earlier versions of this package
    have no mark, so only an admin may use what they name."""
    return key.role is Role.ADMIN or key.made(any_id)


def room_in(limit: int, held: Counter[str], key: NamedKey, wanted: int = 1) -> bool:
    """Whether the key may hold `wanted` more; see `has_room`. `held`: by the marks of keys."""
    return has_room(limit, held.total(), None if key.may_be_alone else held[key.mark], wanted)


def mark_of(any_id: str) -> str:
    """The mark of the key to which what has this id belongs."""
    return any_id[len("tinker-") + _DIGITS :][:_DIGITS]


class Turns:
    """The order of one model's requests. Event loop's thread only.

    Invariant: `next` is the number of the request that runs or is waited for; every number below it has had its turn.
    """

    def __init__(self) -> None:
        self.next = 0
        self._highest = -1
        self._arrived: dict[int, asyncio.Event] = {}
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def repeats(self, number: int | None, digest: bytes) -> bool:
        """Whether the same request has taken this place before."""
        return number is not None and self._digests.get(number) == digest

    def take(self, number: int | None, digest: bytes) -> tuple[int, bool]:
        """Takes the place of a request. None: the place after all others.

        Returns:
            Its number, and whether the same request has taken that place before.

        Raises:
            ConflictError: another request has that number, or it is too long ago to tell.
            OverloadedError: too many requests of this model wait.
        """
        number = self._highest + 1 if number is None else number
        if self.repeats(number, digest):
            return number, True
        if number in self._digests or number < self.next:
            raise ConflictError(
                f"seq_id: the request {number} of this model was another one; the next is {self.next}", param="seq_id"
            )
        if len(self._arrived) >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} requests of this model wait for their turn; try again.")
        self._digests[number] = digest
        self._arrived[number] = asyncio.Event()
        self._highest = max(self._highest, number)
        while len(self._digests) > _REMEMBERED + MAX_WAITING:
            self._digests.popitem(last=False)
        return number, False

    @asynccontextmanager
    async def of(self, number: int) -> AsyncIterator[None]:
        """Waits for the turn of a request that has taken its place. The next one's begins after the block."""
        if number != self.next:
            await self._arrived[number].wait()
        try:
            yield
        finally:
            del self._arrived[number]
            self.next = number + 1
            if (following := self._arrived.get(self.next)) is not None:
                following.set()


@dataclass(eq=False, slots=True)
class TinkerModel:
    """A model in training. `adapter`: the name of its policy. `last_request`: Unix time in seconds. `is_open`: whether
    its policy is open, or being opened."""

    model_id: str
    session_id: str
    adapter: str
    turns: Turns = field(default_factory=Turns)
    last_request: float = field(default_factory=time.time)
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """What a path `tinker://<model_id>/<kind>/<name>` names: a checkpoint of an adapter, by its tag."""

    path: str
    model_id: str
    adapter: str
    tag: str

    @classmethod
    def of(cls, path: str, key: NamedKey) -> SavedWeights:
        """The weights that a key names.

        Raises:
            InvalidRequestError: it is not such a path of this server.
            UnknownModelError: they are another key's.
        """
        match = _PATH.fullmatch(path)
        if match is None or not re.fullmatch(NAME, match[5]):
            raise InvalidRequestError(
                f"path: {shown(path)} is not a path of this server: tinker://<model_id>/weights/<name> or "
                "tinker://<model_id>/sampler_weights/<name>",
                param="path",
            )
        saved = cls(path, match[1], f"{match[2]}-{match[3]}", f"{match[4]}-{match[5]}")
        if not is_of(key, match[2]):
            raise saved.missing()
        return saved

    @classmethod
    def named(cls, model_id: str, kind: str, name: str | None, key: NamedKey) -> SavedWeights:
        """Raises InvalidRequestError if a checkpoint cannot have that name. Also the errors of `of`."""
        if name is None or not re.fullmatch(NAME, name):
            raise InvalidRequestError(
                f"path: {shown(str(name))} cannot be the name of a checkpoint: use 1 to {MAX_NAME} letters, digits, "
                "'.', '_' and '-', not starting with '.'",
                param="path",
            )
        return cls.of(f"tinker://{model_id}/{kind}/{name}", key)

    def missing(self) -> UnknownModelError:
        """The error about weights that were not saved; the checkpoints raise it too."""
        return UnknownModelError(f"{self.adapter!r} has no checkpoint {self.tag!r}")


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session samples from: published weights (`version`), saved ones, or else the base model."""

    sampler_id: str
    version: AdapterRef = BASE_ADAPTER
    saved: SavedWeights | None = None


@dataclass(eq=False, slots=True)
class Session:
    """One client. `seen_at`: when it was last heard of, in seconds of `time.monotonic`."""

    session_id: str
    seen_at: float = field(default_factory=time.monotonic)
    models: dict[str, TinkerModel] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)

    def new_model(self, number: int) -> TinkerModel:
        """The model with this number in the session; a new one if there is none. Raises OverloadedError if there were
        too many."""
        model_id = f"{self.session_id}:train:{number}"
        if model_id not in self.models and len(self.models) >= MAX_MODELS:
            raise OverloadedError(f"This session has had {MAX_MODELS} models; create a new session.")
        if model_id not in self.models:
            self.models[model_id] = TinkerModel(model_id, self.session_id, f"{self.session_id}-{number}")
        return self.models[model_id]

    def sampler_id(self, number: int) -> str:
        return f"{self.session_id}:sample:{number}"

    def add_sampler(self, sampler: Sampler) -> Sampler:
        """Keeps a sampling session, or returns the one that has its id already. The oldest of too many is forgotten."""
        if len(self.samplers) >= MAX_SAMPLERS:
            del self.samplers[next(iter(self.samplers))]
        return self.samplers.setdefault(sampler.sampler_id, sampler)


class TinkerSessions:
    """All sessions. Event loop's thread only.

    Args:
        most: how many there may be.
        timeout_s: after so many seconds of silence a session has ended.
    """

    def __init__(self, most: int, timeout_s: float) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._open: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def of(self, key: NamedKey) -> list[Session]:
        """Those that the key may use."""
        return [session for session in self if is_of(key, session.session_id)]

    def open(self, key: NamedKey) -> Session:
        """A new session of a key. Raises OverloadedError if there are too many, or too many of the key."""
        if not room_in(self._most, Counter(map(mark_of, self._open)), key):
            raise OverloadedError(
                f"{len(self._open)} Tinker sessions are open, and this key may not have more of the {self._most}: "
                "end one, or raise rl_training.tinker.max_sessions"
            )
        session = Session(new_id(key))
        self._open[session.session_id] = session
        return session

    def find(self, session_id: str, key: NamedKey) -> Session:
        """The session, which is alive now. Raises ExpiredError if the key has none of this id."""
        session = self._open.get(session_id)
        if session is None or not is_of(key, session_id):
            raise ExpiredError(f"There is no session {session_id[:100]!r}, or it has ended; create a new one.")
        session.seen_at = time.monotonic()
        return session

    def model(self, model_id: str, key: NamedKey) -> TinkerModel:
        """A model in training. Raises ExpiredError if the key has none of this id."""
        session = self.find(model_id.partition(":")[0], key)
        if model_id not in session.models:
            raise ExpiredError(f"There is no model {model_id[:100]!r}, or it was unloaded; create a new one.")
        model = session.models[model_id]
        model.last_request = time.time()
        return model

    def check_models(self, most: int, key: NamedKey) -> None:
        """Raises OverloadedError if one of several keys may not train one more of the `most` models of all keys. The
        policies themselves are at most so many."""
        models = (each for session in self for each in session.models.values())
        held = Counter(mark_of(each.adapter) for each in models if each.is_open)
        if not key.may_be_alone and not room_in(most, held, key):
            raise OverloadedError(
                f"This key may not train more of the {most} models of all keys: unload one, or raise "
                "rl_training.tinker.max_models"
            )

    def sampler(self, sampler_id: str, key: NamedKey) -> Sampler:
        """A sampling session. Raises ExpiredError if the key has none of this id."""
        session = self.find(sampler_id.partition(":")[0], key)
        if sampler_id not in session.samplers:
            raise ExpiredError(f"There is no sampling session {sampler_id[:100]!r}, or not any more; create a new one.")
        return session.samplers[sampler_id]

    def silent(self) -> list[Session]:
        """The sessions whose clients have been silent for too long."""
        oldest = time.monotonic() - self._timeout_s
        return [session for session in self._open.values() if session.seen_at < oldest]

    def remove(self, session_id: str) -> Session | None:
        return self._open.pop(session_id, None)
