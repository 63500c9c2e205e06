"""`/v1/training/why`: what a version consists of, and which of it pushed an answer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Self

from fastapi import Depends, Query, Request
from pydantic import Field, model_validator

from mlx_parallm.core.models import ServedModel
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ContextLengthError
from mlx_parallm.extras.why.answers import AnswerSpec
from mlx_parallm.extras.why.cards import WhyAnswer, WhyVersion
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import MAX_NAME, NonEmptyTokenIds, WireInput, refused
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import MAX_ADAPTER_NAME, adapter_named_by, check_ids
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep
from mlx_parallm.server.streams import while_connected

if TYPE_CHECKING:
    from mlx_parallm.extras.why.service import Why

MAX_UPDATES = 1000
MAX_SAMPLES, MAX_TOP = 4096, 100

router = Router()

Version = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MAX_ADAPTER_NAME,
        description="A version, such as `math@3`, or the name of an adapter: its live version. Default: the live "
        "version of the default adapter.",
    ),
]


@router.get("/v1/training/why", role=Role.TRAIN)
async def version(
    services: ServicesDep,
    version: Version = None,
    update: Annotated[
        int | None, Query(ge=1, description="The number of one of its updates, to be shown with its trajectories.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_UPDATES, description="Maximum number of updates, the newest.")] = 100,
) -> WhyVersion:
    """What a version consists of, back to the base model: its updates, with the keys that have sent their trajectories,
    what rewarded these, and settings that changed; and of one update, its trajectories with reward, advantage and
    share. What the journal has no more is named. A key sees the trajectories that it has sent itself, and those that
    the server has sampled for tasks of its own; others are counted without a name."""
    why: Why = services.require_extra("why")
    with adapter_named_by("version", version):
        return await why.version(version, update, limit, services.key.reader)


Ids = Annotated[str, Field(min_length=1)] | NonEmptyTokenIds


class WhyBody(WireInput):
    """An answer to ask about: one that was collected, or any prompt with an answer of a version."""

    trajectory_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    """The id of an answer that was collected."""
    version: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)] | None = None
    """In place of `trajectory_id`, with `prompt` and `completion`: the version that gave the answer, such as `math@3`,
    or the name of an adapter: its live version."""
    prompt: Ids | None = None
    """The prompt as the model got it: a text, which is not put into the chat template, or token ids."""
    completion: Ids | None = None
    """The answer, or a part of it whose beginning is in `prompt`: a text, which is encoded without special tokens, or
    token ids."""
    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 256
    """Most samples of the version that are looked at, each with a backward pass: those with the largest shares of the
    longest steps."""
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = 5
    """Most samples that are shown: so many that pushed towards the answer, and so many that pushed away from it."""
    rank_by: Literal["cosine", "score"] = "cosine"
    """What ranks them: how well the sample's direction fits the answer, or by how much the sample is estimated to have
    changed the answer's log-probability."""

    @model_validator(mode="after")
    def _asks_about_one(self) -> Self:
        given = {"version": self.version, "prompt": self.prompt, "completion": self.completion}
        if self.trajectory_id is not None:
            if other := next((name for name, value in given.items() if value is not None), None):
                raise refused("send this or trajectory_id, and not both", other)
        elif missing := next((name for name, value in given.items() if value is None), None):
            raise refused("send this, or trajectory_id in place of version, prompt and completion", missing)
        return self


@router.post("/v1/training/why", role=Role.TRAIN, examples={"a collected answer": {"trajectory_id": "traj-0"}})
async def answer(
    body: Annotated[WhyBody, Depends(json_body(WhyBody))], services: ServicesDep, request: Request
) -> WhyAnswer:
    """The samples of a version that pushed one of its answers most, by products of gradients: which update they were
    in, and by how much they are estimated to have changed the answer's log-probability. The passes take turns with
    requests, as updates do, one answer at a time (409); if the client leaves, the rest is given up. No policy changes.
    Samples that the key may not read are left out, and counted."""
    why: Why = services.require_extra("why")
    async with while_connected(request.receive, services.lifecycle.expired):
        given = None
        if body.trajectory_id is None:
            read = partial(_given, body, services.models.first)
            given = await services.workers.run(request.state.body_bytes, read)
        spec = AnswerSpec(body.trajectory_id or "", given, body.version or "", body.samples, body.top, body.rank_by)
        with adapter_named_by("version", body.version):
            return await why.answers.answer(spec, services.key.reader)


def _given(body: WhyBody, model: ServedModel) -> GivenTrajectory:
    """The tokens of a prompt and its answer. Texts are encoded, so call it in a worker thread.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary.
        ContextLengthError: they are longer than the context.
    """
    context, encode = model.card.context_length, model.tokenizer.encode
    prompt = encode(body.prompt, True, context) if isinstance(body.prompt, str) else body.prompt or []
    completion = encode(body.completion, False, context) if isinstance(body.completion, str) else body.completion or []
    check_ids(prompt, model.card.vocab_size, "prompt")
    check_ids(completion, model.card.vocab_size, "completion")
    if len(prompt) + len(completion) > context:
        raise ContextLengthError(
            f"prompt and completion have {len(prompt) + len(completion)} tokens, and the model's context {context}.",
            param="prompt",
        )
    return GivenTrajectory(tuple(prompt), tuple(completion))
