"""Other APIs on top of chat and completions: how their bodies are translated, and whose names the errors have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlx_parallm.errors import RequestError
from mlx_parallm.server.api.bodies import GenerationBody
from mlx_parallm.server.body import validated

Body = TypeVar("Body", bound=GenerationBody)

CONVERSATION = "(messages|prompt|continue_final_message).*"
"""Of `Dialect.names`: the fields of chat that are the whole conversation to a client whose messages are not chat's."""


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Body]):
    """An API whose bodies are translated into bodies of chat or of completions, which the rest of the server knows.

    Attributes:
        body: what its bodies become.
        names: what its clients call fields of `body`, where the names differ. Maps regular expressions for the
            beginning of a field's path to what takes the place of that beginning; the first one that fits counts.
    """

    body: type[Body]
    names: Mapping[str, str]

    def translated(self, fields: Mapping[str, Any]) -> Body:
        """The body with these fields. Those that are None count as left out.

        Raises:
            InvalidRequestError: the body is not valid.
        """
        with self.own_names():
            return validated(self.body, {name: value for name, value in fields.items() if value is not None})

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors that leave the block name the field as the client does: in `param`, and where their message begins
        with the name."""
        try:
            yield
        except RequestError as error:
            if error.param is None or (param := self._own_name(error.param)) == error.param:
                raise
            message = str(error)
            if message.startswith(f"{error.param}:"):
                message = param + message.removeprefix(error.param)
            raise type(error)(message, param=param) from None

    def _own_name(self, path: str) -> str:
        for ours, theirs in self.names.items():
            if found := re.match(rf"(?:{ours})(?!\w)", path):
                return found.expand(theirs) + path[found.end() :]
        return path
