"""Who may use the server: keys and their roles, the ring that finds the key which a request sends, and sessions.

The file of keys has the SHA-256 of each key and not the key itself. A key is 256 random bits, so nobody can find it by
trying, and a hash that is slow on purpose, as passwords need it, would only delay every request.

People who open a page log in with their key once. Then the browser need not keep the key, and no URL has it:

    GET /dashboard ──▶ 303 /login ──▶ POST key ──▶ a random id in a cookie, 303 /dashboard
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from mlx_parallm.atomic import replace_file
from mlx_parallm.config.types import Section
from mlx_parallm.core.machine import seconds_with_sleep
from mlx_parallm.core.readers import Reader
from mlx_parallm.errors import MALFORMED, ConfigError, OverloadedError

if TYPE_CHECKING:  # `mlx_parallm keys` imports this module, and needs no HTTP
    from starlette.datastructures import Headers
    from starlette.types import Scope


class Role(StrEnum):
    """The roles of a key. Each may do what those before it may do."""

    INFERENCE = "inference"
    """Asks the model, and reads its own stored responses."""
    TRAIN = "train"
    """Also teaches: collects trajectories, sends rewards, controls training, and loads, publishes and rolls back
    adapters."""
    ADMIN = "admin"
    """Also stops and changes the server for everybody, and reads other people's prompts and usage."""

    def allows(self, needed: Role) -> bool:
        """Whether a key of this role may do what needs `needed`."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Access:
    """What a route needs of a key.

    Attributes:
        role: the least role; None: no key is needed.
        audited: whether it is a control action, which the audit log records.
    """

    role: Role | None
    audited: bool = False


UNDECLARED = Access(Role.ADMIN, audited=True)
"""What a route needs that does not say it."""


# -- keys ------------------------------------------------------------------------------------------


MAX_KEYS = 256
"""Most keys of a file. Each request is compared with all of them, and each has its own metrics."""
MAX_FILE_BYTES = 2**20
KEY_PREFIX = "sk-"

_MARKED = re.compile(r"tinker-[0-9a-f]{12}([0-9a-f]{12})([-:].*)?")
"""The id of a Tinker client's session, model or adapter. The group is the mark of its key."""

log = logging.getLogger(__name__)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Limit = Annotated[int, Field(ge=1)]
Pattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9._*?-]{1,64}$")]


class NamedKey(Section):
    """A key as the file has it: who uses it, what it may do, and its limits."""

    name: Name
    """Who uses it: 1 to 64 of the characters A-Z a-z 0-9 . _ -"""
    role: Role
    """What it may do."""
    sha256: str = Field(repr=False, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the key, in hexadecimal digits."""
    created: str = ""
    """When it was made, in ISO 8601."""
    requests_per_minute: Limit | None = None
    """Most requests for answers in a minute."""
    tokens_per_minute: Limit | None = None
    """Most tokens of prompts and answers in a minute."""
    max_concurrent: Limit | None = None
    """Most requests for answers under way at a time."""
    least_priority: int = 0
    """The lowest `priority` that its requests may have; lower ones run earlier. An admin key may have any."""
    own_prefix_cache: bool = False
    """Whether its prompts are cached apart from those of other keys."""
    adapters: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=64)] | None = None
    """Patterns of the names of the adapters that it may use; `base` is the base model, and `*` stands for any text.
    Other adapters are unknown to the key. Null: it may use all. Not for an admin key, which may do everything."""

    @field_validator("adapters")
    @classmethod
    def _limits_no_admin(cls, adapters: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if adapters is not None and info.data.get("role") is Role.ADMIN:
            raise ValueError("an admin key may do everything; give it another role, or leave the adapters out")
        return adapters

    @property
    def mark(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of its name, in ids of things that outlive the process."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:12]

    def made(self, any_id: str) -> bool:
        """Whether an id has the mark of this key, as the ids of a Tinker client's session, models and adapters do."""
        marked = _MARKED.fullmatch(any_id)
        return marked is not None and marked[1] == self.mark

    def may_change(self, adapter: str) -> bool:
        """Whether it may change the adapter of this name: it sees that, and no other key trains it with Tinker."""
        others = _MARKED.fullmatch(adapter) is not None and not self.made(adapter)
        return self.role is Role.ADMIN or (self.sees(adapter) and not others)

    @property
    def may_be_alone(self) -> bool:
        """Whether the server may have no other key."""
        return self.name in (ANYONE.name, API_KEY)

    def sees(self, adapter: str) -> bool:
        """Whether it may use the adapter of this name, or know of it. What it has trained with Tinker it always may."""
        if self.adapters is None:
            return True
        return any(fnmatchcase(adapter, pattern) for pattern in self.adapters) or self.made(adapter)

    def salt(self, given: str) -> str:
        """The salt of its requests in the prefix cache, for the one that a request gives. For a key with a prefix cache
        of its own, it is one that nobody can send who does not have the file of keys."""
        if not self.own_prefix_cache:
            return given
        return hashlib.sha256(f"{self.sha256}:{given}".encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def reader(self) -> Reader:
        """What it may read, reward and train."""
        return Reader(self.name, self.role is Role.ADMIN, self.may_change)


def _unhashed(name: str) -> NamedKey:
    """An admin key that is in no file."""
    return NamedKey(name=name, role=Role.ADMIN, sha256="0" * 64)


ANYONE = _unhashed("anyone")
"""Stands for every client of a server that requires no key."""
API_KEY = "api-key"
"""The name of the key that is set as `server.api_key`."""
CLUSTER_TOKEN = "cluster-token"
"""The name of the token of a cluster, which the other nodes send."""


def digest(key: bytes) -> str:
    """The SHA-256 of a key, as the file has it."""
    return hashlib.sha256(key).hexdigest()


# -- the file --------------------------------------------------------------------------------------


def read_keys(file: Path) -> tuple[NamedKey, ...]:
    """The keys of a file.

    Raises:
        ConfigError: it cannot be read, or is not a file of keys.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: the file of keys cannot be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: longer than {MAX_FILE_BYTES} bytes, so it is not a file of keys")
    try:
        return _checked(json.loads(raw)["keys"])
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise ConfigError(f"{file}: {where}: {fault['msg']}; `mlx_parallm keys` writes such files") from None
    except MALFORMED as error:
        raise ConfigError(f"{file}: not a file of keys ({error}); `mlx_parallm keys add` makes one") from None


def _checked(entries: Any) -> tuple[NamedKey, ...]:
    keys = tuple(map(NamedKey.model_validate, entries))
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys; at most {MAX_KEYS} are allowed")
    if len({key.name for key in keys}) < len(keys):
        raise ValueError("two keys have the same name")
    if reserved := {ANYONE.name, API_KEY, CLUSTER_TOKEN} & {key.name for key in keys}:
        raise ValueError(f"the name {min(reserved)} is reserved")
    return keys


def write_keys(file: Path, keys: Sequence[NamedKey]) -> None:
    """Writes a file of keys, whole or not at all, that only its owner can read.

    Raises:
        ConfigError: the keys cannot be in one file, or it cannot be written.
    """
    entries = [key.model_dump(mode="json", exclude_defaults=True) for key in keys]
    try:
        _checked(entries)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, (json.dumps({"keys": entries}, indent=2) + "\n").encode(), mode=0o600)
    except OSError as error:
        raise ConfigError(f"{file}: the file of keys cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


def new_key(name: str, role: Role, **limits: Any) -> tuple[NamedKey, str]:
    """A new key, and its secret, which is kept nowhere else.

    Args:
        limits: other fields of `NamedKey`.

    Raises:
        ConfigError: the name, or a limit, is not allowed.
    """
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return NamedKey(name=name, role=role, sha256=digest(secret.encode()), created=created, **limits), secret
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        raise ConfigError(f"{fault['loc'][0]}: {fault['msg']}") from None


# -- the ring --------------------------------------------------------------------------------------

MOST_WRONG, WITHIN_S = 10, 60.0
"""How many different wrong keys one address may send within so many seconds. A program that keeps sending an old key
makes nobody wait."""
UNGUESSABLE = 24
"""Keys of at least so many characters, such as those that `keys add` makes, never wait."""
MAX_ADDRESSES, MAX_KNOWN = 1000, 10_000


class KeyRing:
    """The keys that a server accepts now. The file is read again when it has changed, so that a new key works, and a
    removed one does not, from the next request on. Who sends too many wrong keys has to wait, so that a short one
    cannot be guessed. Used on the event loop's thread only.

    Invariant: it remembers wrong keys of at most `MAX_ADDRESSES` addresses and at most `MAX_KNOWN` right ones; the
    oldest are forgotten.

    Attributes:
        required: whether requests need a key.

    Args:
        api_key: the one key of a server without a file, or one more. It is an admin key.
        file: the file of named keys.
        cluster_token: what the other nodes of a cluster send, if this server is one. It is a key that may train, and
            requires nobody else to have one.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(
        self,
        api_key: str | None = None,
        file: Path | None = None,
        cluster_token: str | None = None,
        clock: Callable[[], float] = seconds_with_sleep,
    ) -> None:
        own = ((API_KEY, Role.ADMIN, api_key), (CLUSTER_TOKEN, Role.TRAIN, cluster_token))
        self._own = tuple(
            NamedKey(name=name, role=role, sha256=digest(secret.encode())) for name, role, secret in own if secret
        )
        self.required = api_key is not None or file is not None
        self._file = file
        self._version = None if file is None else _version_of(file)
        self._keys = self._own if file is None else (*self._own, *read_keys(file))
        self._clock = clock
        self._wrong: OrderedDict[str, dict[str, float]] = OrderedDict()  # when an address sent each, by its digest
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()  # right keys of addresses, by their digests

    @property
    def keys(self) -> tuple[NamedKey, ...]:
        """All keys that are accepted now."""
        self._read_if_changed()
        return self._keys

    def find(self, secret: bytes, address: str = "") -> NamedKey | None:
        """The key that a client has sent from this address; None if it is none of them.

        Raises:
            OverloadedError: the address has sent too many wrong keys, and has not sent this one before.
        """
        sha256 = digest(secret)
        key, wrong = self.of_digest(sha256), self._recent(address)
        safe = key is not None and (len(secret) >= UNGUESSABLE or (address, sha256) in self._known)
        if len(wrong) >= MOST_WRONG and sha256 not in wrong and not safe:
            wait_s = math.ceil(min(wrong.values()) + WITHIN_S - self._clock())
            raise OverloadedError(f"Too many wrong keys; try again in {wait_s} s.", wait_s)
        if key is None:
            self._wrong[address] = {**wrong, sha256: self._clock()}
            self._wrong.move_to_end(address)
        else:
            self._known[address, sha256] = None
            self._known.move_to_end((address, sha256))
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return key

    def _recent(self, address: str) -> dict[str, float]:
        since = self._clock() - WITHIN_S
        return {sha256: at for sha256, at in self._wrong.get(address, {}).items() if at > since}

    def of_digest(self, sha256: str) -> NamedKey | None:
        """The key with this SHA-256. It is compared with every key, each in constant time, so that the time tells
        nothing about any of them."""
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, sha256):
                found = key
        return found

    def _read_if_changed(self) -> None:
        """Reads the file again if it was written since. If it cannot be used, the keys stay as they were, because a
        slip in the file must not lock everybody out; the log says so once."""
        if self._file is None or (version := _version_of(self._file)) == self._version:
            return
        self._version = version
        try:
            self._keys = (*self._own, *read_keys(self._file))
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)


def _version_of(file: Path) -> tuple[int, int, int] | None:
    """Differs after each time that the file was written; None if there is no file."""
    try:
        found = os.stat(file)
    except OSError:  # a missing file is reported when it is read
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


# -- sessions --------------------------------------------------------------------------------------

COOKIE = "mlx_parallm_session"
LIFETIME_S = 12 * 3600
MAX_SESSIONS = 1000

PAGES = frozenset({"/", "/dashboard", "/docs"})
"""Pages that people open in a browser. Without a key, a browser is sent to the login page."""
LOGIN = "/login"


class Sessions:
    """Who is logged in. Used on the event loop's thread only.

    Sessions are in memory. They end with the server, after `LIFETIME_S`, or when their key is removed.

    Invariant: at most `MAX_SESSIONS` sessions. The oldest of the key that has the most is forgotten.
    """

    def __init__(self, ring: KeyRing, clock: Callable[[], float] = seconds_with_sleep) -> None:
        self._ring = ring
        self._clock = clock
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()  # the digest of the key, and when it ends

    def open(self, key: NamedKey) -> str:
        """The id of a new session of this key."""
        session_id = secrets.token_urlsafe(32)
        self._sessions[session_id] = (key.sha256, self._clock() + LIFETIME_S)
        while len(self._sessions) > MAX_SESSIONS:
            [(most, _)] = Counter(digest for digest, _ in self._sessions.values()).most_common(1)
            del self._sessions[next(each for each, (digest, _) in self._sessions.items() if digest == most)]
        return session_id

    def key_of(self, headers: Headers) -> NamedKey | None:
        """The key whose session the cookie names; None if there is none, or not any more."""
        session_id = _cookie(headers)
        digest, until = self._sessions.get(session_id, ("", 0.0))
        if until > self._clock():
            return self._ring.of_digest(digest)
        self._sessions.pop(session_id, None)
        return None

    def close(self, headers: Headers) -> None:
        """Ends the session that the cookie names, if there is one."""
        self._sessions.pop(_cookie(headers), None)


def _cookie(headers: Headers) -> str:
    """The id in the cookie; empty if there is none."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:  # another program's cookie is malformed
        return ""
    return "" if cookie is None else cookie.value


def from_other_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another site, or of another port of this machine, made the request."""
    return headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def from_own_page(scope: Scope, headers: Headers) -> bool:
    """Whether a request that has only a cookie comes from a page of this server, or opens one of its pages. Browsers
    send the cookie by themselves.

    `SameSite=Strict` keeps the pages of other sites from using the cookie, but programs at other ports of the same
    machine are the same site. Origin, Sec-Fetch-Site and Referer tell them apart; the first one that was sent counts.
    """
    own = f"{scope['scheme']}://{headers.get('host', '')}".lower()
    if "origin" in headers:
        return all(origin.lower() == own for origin in headers.getlist("origin"))
    opens_page = scope["method"] == "GET" and scope["path"] in PAGES
    if "sec-fetch-site" in headers:
        site = headers["sec-fetch-site"]
        return site == "same-origin" or (opens_page and site == "none")
    if "referer" in headers:
        return f"{headers['referer'].lower()}/".startswith(f"{own}/")
    return opens_page
