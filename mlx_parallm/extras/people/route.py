"""`/v1/training/preference` and `/v1/training/report`: edited answers, and what was learnt from whom. Training gets an
edit as token ids, checked against the model and the trajectories that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Query
from starlette.requests import Request

from mlx_parallm.core.readers import Reader
from mlx_parallm.core.text import control_ids, end_id
from mlx_parallm.errors import ConflictError, ContextLengthError, InvalidRequestError, UnknownTrajectoryError
from mlx_parallm.extras.people.schema import PreferenceBody
from mlx_parallm.extras.people.service import Edit, EditCard, FoundTrajectory, SignalReport
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.conversation import Conversation
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import adapter_named_by, check_ids
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep

if TYPE_CHECKING:
    from mlx_parallm.extras.people.service import People


def adapter_of(body: PreferenceBody, found: Mapping[str, FoundTrajectory], default: str) -> str:
    """The adapter that learns from an edit. `found`: the trajectories that it names, by field.

    Raises:
        ConflictError: they train another adapter than the one that it names, or different ones.
    """
    wanted = body.lora_adapter or next((each.adapter for each in found.values()), default)
    for field, each in found.items():
        if each.adapter != wanted:
            raise ConflictError(
                f"{field}: this answer trains {each.adapter!r} and cannot teach {wanted!r}; send it for its own "
                "adapter, or its text.",
                param=field,
            )
    return wanted


def edit_of(body: PreferenceBody, found: Mapping[str, FoundTrajectory], adapter: str, services: Services) -> Edit:
    """What training gets of an edit. Texts are encoded, so call it in a worker thread.

    Raises:
        InvalidRequestError: an id is not in the vocabulary, a text has control tokens, the named trajectories have
            different prompts, or the two answers are equal.
        ContextLengthError: prompt and answer are longer than the context.
    """
    prompt = _prompt(body, found, services)
    for field in ("chosen_id", "rejected_id"):
        if field in found and found[field].prompt_ids != prompt:
            raise InvalidRequestError(f"{field}: this answer is to another prompt.", param=field)
    text = body.chosen if body.correction is None else body.correction
    field = "chosen" if body.correction is None else "correction"
    chosen = _answer(field, text, found.get("chosen_id"), services)
    rejected = _answer("rejected", body.rejected, found.get("rejected_id"), services)
    if chosen == rejected:
        raise InvalidRequestError("chosen and rejected are the same answer.", param="rejected")
    context = services.models.first.card.context_length
    if (tokens := len(prompt) + max(len(chosen), len(rejected))) > context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens, and the edit has {tokens}.", param=field
        )
    return Edit(
        adapter,
        prompt,
        chosen,
        rejected,
        found["chosen_id"].text if "chosen_id" in found else text or "",
        found["rejected_id"].text if "rejected_id" in found else body.rejected or "",
        body.user or "",
        body.trajectory_id or body.rejected_id or "",
    )


def _prompt(body: PreferenceBody, found: Mapping[str, FoundTrajectory], services: Services) -> tuple[int, ...]:
    card, tokenizer = services.models.first.card, services.models.first.tokenizer
    if body.messages is not None:
        conversation = Conversation.of(body.messages, (), tokenizer)
        return tuple(conversation.render(tokenizer, at_most=card.context_length))
    if body.prompt is not None or body.prompt_token_ids is not None:
        ids = body.prompt_token_ids or tokenizer.encode(body.prompt or "", True, card.context_length)
        check_ids(ids, card.vocab_size, "prompt_token_ids" if body.prompt is None else "prompt")
        return tuple(ids)
    return next(iter(found.values())).prompt_ids


def _answer(field: str, text: str | None, found: FoundTrajectory | None, services: Services) -> tuple[int, ...]:
    """The tokens of an answer; none if there is no such answer. A text is ended by the end-of-sequence token.

    Raises:
        InvalidRequestError: the text has a control token, which people do not write.
    """
    if found is not None:
        return found.completion_ids
    if text is None:
        return ()
    tokenizer = services.models.first.tokenizer
    ids = tokenizer.encode(text, False, services.models.first.card.context_length)
    check_ids(ids, services.models.first.card.vocab_size, field)
    if control := control_ids(tokenizer).intersection(ids):
        mark = tokenizer.token_string(min(control))
        raise InvalidRequestError(f"{field}: the text has the control token {mark!r}; leave it out.", param=field)
    return (*ids, end_id(tokenizer))


router = Router()


async def people_of(services: ServicesDep) -> People:
    people: People = services.require_extra("people")
    return people


PeopleDep = Annotated["People", Depends(people_of)]


@router.post(
    "/v1/training/preference",
    role=Role.TRAIN,
    examples={
        "a preference": {"chosen": "Yes.", "rejected_id": "traj-0"},
        "a correction": {"trajectory_id": "traj-0", "correction": "Yes."},
    },
)
async def preference(
    body: Annotated[PreferenceBody, Depends(json_body(PreferenceBody))],
    request: Request,
    services: ServicesDep,
    people: PeopleDep,
) -> EditCard:
    """Takes an edited answer: a preference of one answer over another, or a correction that is imitated. It may be
    about any answer of this run, also one that was trained on or dropped. The answer comes when the edit is on the
    disk, so that a crash does not lose it."""
    training, key = services.require_training(), services.key
    with adapter_named_by("lora_adapter", body.lora_adapter):
        found = {field: await _found(people, field, named, key.reader) for field, named in body.trajectories.items()}
        named = body.lora_adapter
        default = training.default_adapter if named is None else training.status(named, reader=key.reader).adapter
        adapter = adapter_of(body, found, default)
        encode = partial(edit_of, body, found, adapter, services)
        edit = replace(await services.workers.run(request.state.body_bytes, encode), owner=key.name)
        return await services.lifecycle.run_to_end(people.edit(edit, key.reader))


async def _found(people: People, field: str, trajectory_id: str, reader: Reader) -> FoundTrajectory:
    """The trajectory that a field names. Raises UnknownTrajectoryError, naming the field, if there is none."""
    try:
        return await people.find(trajectory_id, reader)
    except UnknownTrajectoryError as error:
        raise UnknownTrajectoryError(f"{field}: {error}", param=field) from None


@router.get("/v1/training/report", role=Role.TRAIN)
async def report(
    services: ServicesDep,
    people: PeopleDep,
    lora_adapter: Annotated[str | None, Query(description="A trained adapter. Default: the default adapter.")] = None,
) -> SignalReport:
    """What an adapter was taught by since the server started: how much came from each source, what became of it, and
    what the updates that learnt from it changed."""
    with adapter_named_by("lora_adapter", lora_adapter):
        return people.signal_report(lora_adapter, services.key.reader)
