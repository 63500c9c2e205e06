"""What the requests for embeddings, scores and rankings have in common. They draw no tokens, so they have no fields of
sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.server.api.fields import CHOSEN_ID, INT32_MAX, OpenBody, refused
from mlx_parallm.server.api.generation_fields import MAX_CACHE_SALT, Priority
from mlx_parallm.server.api.sampling_fields import MAX_SEQUENCES

MAX_INPUTS = 2048
"""Largest number of texts of one request, which is OpenAI's. At most `MAX_SEQUENCES` are in the engine at a time."""
MAX_TOKENS = 2**20
"""Number of tokens that all texts of one request may have together; or more, if `MAX_SEQUENCES` as long as the context
have more. Where one text stands in all pairs, the size of the body does not bound them."""
WHOLE_CONTEXT = -1
"""The value of `truncate_prompt_tokens` that means the context's length."""


def _not_zero(value: int) -> int:
    if value == 0:
        raise refused("must be at least 1, or -1 for the context's length")
    return value


def together(prompts: Iterable[Sequence[int]], context: int, param: str) -> tuple[tuple[int, ...], ...]:
    """The token ids of all texts. Raises InvalidRequestError, naming `param`, as soon as they are too many."""
    most, total, taken = max(MAX_TOKENS, MAX_SEQUENCES * context), 0, []
    for ids in prompts:
        total += len(ids)
        if total > most:
            raise InvalidRequestError(
                f"{param}: together, the texts have more than {most} tokens; send fewer at a time.", param=param
            )
        taken.append(tuple(ids))
    return tuple(taken)


Truncation = Annotated[int, Field(ge=WHOLE_CONTEXT, le=INT32_MAX), AfterValidator(_not_zero)]


class PoolingBody(OpenBody):
    """The model, and how long texts may be. The constants stand for the fields that only a generation has."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"mm_processor_kwargs"})

    adapters: ClassVar[None] = None
    stream: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    collect_trajectory: ClassVar[bool] = False
    group_id: ClassVar[None] = None
    episode_id: ClassVar[None] = None
    task_prompt: ClassVar[None] = None
    safety_identifier: ClassVar[None] = None

    model: str | None = None
    """The served model, `base`, or an adapter: its name (for the live version), `name@version`, or a checkpoint of the
    default adapter. If it is left out or names the served model, the route of `/v1/adapters/route` chooses."""
    lora_adapter: str | None = None
    """An adapter, named as in `model`. `model` may name the served model at the same time."""
    user: str | None = None
    """The user. While two versions of an adapter are compared, all requests of a user get the same one."""
    request_id: Annotated[str, Field(pattern=f"^{CHOSEN_ID.pattern}$")] | None = None
    """An id of the client's choice, as in completions."""
    priority: Priority = 0
    """Requests with lower values run earlier."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """A text of the client's choice. Requests share cached prefixes only with requests that have the same one."""
    truncate_prompt_tokens: Truncation | None = None
    """Longer texts are cut to this many tokens; -1 cuts them to the model's context. If it is left out, a text that is
    longer than the context is an error."""

    def most_tokens(self, context: int) -> int | None:
        """The number of tokens to which texts are cut. None: they are not cut.

        Raises:
            InvalidRequestError: it is over the `context`.
        """
        most = self.truncate_prompt_tokens
        if most is not None and most > context:
            raise InvalidRequestError(
                f"{most} tokens are more than the model's context of {context}; send less, or -1 for the context.",
                param="truncate_prompt_tokens",
            )
        return context if most == WHOLE_CONTEXT else most
