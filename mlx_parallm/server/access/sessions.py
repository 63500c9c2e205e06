"""Sessions of people who have opened a page of the server with their key: a random id in a cookie, so that the browser
need not keep the key, and no URL has it.

    GET /dashboard ──▶ 303 /login ──▶ POST key ──▶ cookie, 303 /dashboard

A browser sends the cookie by itself, so a request that has only the cookie must show that a page of this server made
it (see `from_own_page`). Sessions are in memory. They end with the server, after `LIFETIME_S`, or when their key is
removed.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_parallm.core.machine import seconds_with_sleep
from mlx_parallm.server.access.keys import KeyRing, NamedKey

COOKIE = "mlx_parallm_session"
LIFETIME_S = 12 * 3600
MAX_SESSIONS = 1000

PAGES = frozenset({"/", "/dashboard", "/docs"})
"""Pages that people open in a browser. Without a key, a browser is sent to the login page."""
LOGIN = "/login"


class Sessions:
    """Who is logged in. Used on the event loop's thread only.

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
    """Whether a request that has only a cookie comes from a page of this server, or opens one of its pages.

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
