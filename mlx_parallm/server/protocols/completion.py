"""Bodies of other protocols as bodies of `/v1/completions`, which the rest of the server knows.

The fields that a protocol shares with completions keep their names and bounds; the others are translated. Errors name
the fields as the client sent them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import ValidationError

from mlx_parallm.errors import RequestError
from mlx_parallm.server.api.completions import CompletionBody
from mlx_parallm.server.api.generation_fields import CollectableBody
from mlx_parallm.server.http.body import first_fault


class ProtocolBody(CompletionBody):
    """A completion for a program that says itself how tokens are drawn."""

    MODEL_DEFAULTS: ClassVar[bool] = False


def sent_collection(body: CollectableBody) -> dict[str, Any]:
    """The fields of `CollectableBody` that a client sent."""
    return {name: getattr(body, name) for name in CollectableBody.model_fields if name in body.model_fields_set}


def completion_body(fields: Mapping[str, Any], names: Mapping[str, str]) -> CompletionBody:
    """The body of a completion with these fields; those that are None count as left out.

    Args:
        names: what the client calls a field of the completion, where the names differ.

    Raises:
        InvalidRequestError: the fields do not fit together.
    """
    with client_names(names):
        try:
            return ProtocolBody.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise first_fault(error) from None


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field that leave the block name it as the client does. `names`: as for `completion_body`."""
    try:
        yield
    except RequestError as error:
        ours, message = error.param, str(error)
        if ours is None or ours not in names:
            raise
        theirs = names[ours]
        if message.startswith(f"{ours}:"):
            message = theirs + message[len(ours) :]
        raise type(error)(message, param=theirs) from None
