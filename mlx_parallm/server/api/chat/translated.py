"""Bodies of other APIs as bodies of chat. Errors name the fields as the client sent them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from mlx_parallm.errors import RequestError
from mlx_parallm.server.api.chat.schema import ChatBody
from mlx_parallm.server.http.body import first_fault


def chat_body(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatBody:
    """The chat body with these fields. Those that are None count as left out.

    Args:
        names: see `client_names`.

    Raises:
        InvalidRequestError: the body is not valid.
    """
    with client_names(names):
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise first_fault(error) from None


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces names of chat's fields in the errors that leave the block.

    Args:
        names: maps parts of chat's names to those of the client's API. Longer names come before their own prefixes.
            The name for `messages` stands for the whole conversation, because its messages are not those of the client.
    """
    try:
        yield
    except RequestError as error:
        if error.param is None:
            raise
        param = _client_name(error.param, names)
        raise type(error)(str(error).replace(error.param, param), param=param) from None


def _client_name(param: str, names: Mapping[str, str]) -> str:
    if param.startswith(("messages", "prompt")):
        return names["messages"]
    for ours, theirs in names.items():
        param = param.replace(ours, theirs)
    return param
