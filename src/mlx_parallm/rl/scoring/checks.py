"""Checks: whether a request brings what its scorer reads, without the request's text holding up the server.

What may take long (compiling a pattern, checking a schema) is done in a scoring process of its own, once for each
pattern or schema; sizes are bounded before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict

from mlx_parallm.core import Collection
from mlx_parallm.errors import InvalidRequestError, OverloadedError
from mlx_parallm.rl.parts import ScoringError
from mlx_parallm.rl.scoring.catalogue import Catalogue
from mlx_parallm.rl.scoring.fields import PARAM
from mlx_parallm.rl.scoring.names import terms
from mlx_parallm.rl.scoring.pool import Job, Pool
from mlx_parallm.rl.scoring.registry import BUILTINS

_PATIENCE_S = 15.0
"""How long a request waits for its check, the checks of others before it included."""

_LIMIT_S = 5.0
"""After which the process is killed; it stops by itself after less (`worker.CHECK_S`) if Python can stop it."""

_REMEMBERED = 1024


class Checks:
    """On one event loop."""

    def __init__(self) -> None:
        self._catalogue = Catalogue()
        self._asking = asyncio.Lock()
        self._pool = Pool(1, 1, _LIMIT_S)
        self._known: OrderedDict[bytes, str] = OrderedDict()  # digest → why it is refused, or ""

    async def check(self, collection: Collection) -> None:
        """Waits for a child process, for seconds, the first time that a scorer is named which is not built in.

        Raises:
            InvalidRequestError: unknown or unusable scorer, or `metadata` lacks what it reads.
            OverloadedError: too many other requests are being checked.
        """
        if self._catalogue.must_ask(collection):
            async with self._asking:  # one thread waits for a child, the other requests for the lock
                await asyncio.to_thread(self._catalogue.check_bounds, collection)
        else:
            self._catalogue.check_bounds(collection)
        for term in terms(collection.scorer) if collection.scorer is not None else ():
            if (builtin := BUILTINS.get(term.scorer)) is not None and builtin.read is not None:
                await self._check_value(term.scorer, builtin.key, collection)

    async def close(self) -> None:
        await self._pool.close()

    async def _check_value(self, scorer: str, key: str, collection: Collection) -> None:
        text = json.dumps([scorer, collection.metadata[key]], sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in self._known:
            self._remember(digest, await self._asked(scorer, key, collection))
        self._known.move_to_end(digest)
        if refusal := self._known[digest]:
            raise InvalidRequestError(refusal, PARAM)

    async def _asked(self, scorer: str, key: str, collection: Collection) -> str:
        message = {"check": scorer, "metadata": {key: collection.metadata[key]}}
        job = Job(collection.client, scorer, 1, message, lambda reply: isinstance(reply.get("refused"), str))
        try:
            return str((await asyncio.wait_for(self._pool.run(job), _PATIENCE_S))["refused"])
        except TimeoutError as error:
            raise OverloadedError("What other requests bring for their scorers is being checked; try again.") from error
        except ScoringError as error:
            return f"{PARAM}.{key} could not be checked: {error}"

    def _remember(self, digest: bytes, refusal: str) -> None:
        self._known[digest] = refusal
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
