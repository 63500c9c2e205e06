"""Which adapter a request's fields name, and how a name that means nothing is answered.

A *selector* is what `core.AdapterClient` takes: `name`, `name@version`, a checkpoint or a tag, or `base`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mlx_parallm.errors import InvalidRequestError, UnknownModelError
from mlx_parallm.server.wire.common import GenerationBody

MAX_SELECTOR = 160
"""Characters; nothing longer can be a name."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request asks for: `param` is the field that says so, both None where no field does."""

    selector: str | None = None
    param: str | None = None


def choose(body: GenerationBody, served: str) -> Choice:
    """The one selector in `model`, `lora_adapter` and `adapters`; `served` as `model` names no adapter.

    Raises:
        InvalidRequestError: two of them differ.
    """
    choices = [
        Choice(selector, param)
        for param, selector in (
            ("model", None if body.model == served else body.model),
            ("lora_adapter", body.lora_adapter),
            ("adapters", body.adapters),
        )
        if selector is not None
    ]
    for other in choices[1:]:
        if other.selector != choices[0].selector:
            raise InvalidRequestError(
                f"{choices[0].param} and {other.param} name different adapters; send one of them.", param=other.param
            )
    return choices[0] if choices else Choice()


@contextmanager
def naming(param: str | None, *selectors: str) -> Iterator[None]:
    """While the block runs, an UnknownModelError names `param`.

    Raises:
        UnknownModelError: at once, for a selector that is too long to be one.
    """
    try:
        for selector in selectors:
            if len(selector) > MAX_SELECTOR:
                raise UnknownModelError(
                    f"No model or adapter has a name of {len(selector)} characters; see GET /v1/models."
                )
        yield
    except UnknownModelError as error:
        raise UnknownModelError(str(error), param=param) from None
