"""`/v1/training`: updates, feedback, groups, control, status and events; `/debug/training` and `/debug/trajectories`.

A change runs to its end even if the client disconnects. If the server does not train, the status and debug routes still
answer, and all others answer 409.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import Depends, Header, Path, Query
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.json_values import fields_of
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.trajectories import GivenTrajectory, GroupCard
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.rl.status import TrainingEvent, TrainingStatus, UpdateReport
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.generation_fields import MAX_EPISODE_ID
from mlx_parallm.server.api.training.objects import (
    DebugAdapterTraining,
    DebugTraining,
    DebugTrajectories,
    FeedbackObject,
    TrainingObject,
    status_object,
    trajectory_object,
)
from mlx_parallm.server.api.training.schema import (
    ControlBody,
    FeedbackBody,
    GivenTrajectoryBody,
    TrainingRollbackBody,
    UpdateBody,
)
from mlx_parallm.server.body import json_body
from mlx_parallm.server.errors import DrainingError, error_body
from mlx_parallm.server.openapi import EVENTS
from mlx_parallm.server.request import adapter_named_by, check_ids
from mlx_parallm.server.request_log import record_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import CollectionDep, Lifecycle, Services, ServicesDep, TrainingDep
from mlx_parallm.server.streams import EventStream, sent_event, while_connected

if TYPE_CHECKING:
    from mlx_parallm.extras.lessons.service import Lessons
    from mlx_parallm.rl.service import TrainingService


def given_trajectories(bodies: Sequence[GivenTrajectoryBody], services: Services) -> list[GivenTrajectory]:
    """What training gets of these bodies. Texts are encoded, so call it in a worker thread.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary, or the number of logprobs or advantages is wrong.
        ContextLengthError: a trajectory is longer than the context.
        UnknownModelError: a `lora_version` is unknown.
    """
    return [_trajectory(body, services, f"trajectories[{number}]") for number, body in enumerate(bodies)]


def _trajectory(body: GivenTrajectoryBody, services: Services, param: str) -> GivenTrajectory:
    if body.token_ids is not None and body.mask is not None:
        return _row(body, body.token_ids, body.mask, services, param)
    card, encode = services.models.first.card, services.models.first.tokenizer.encode
    prompt = body.prompt_token_ids or encode(body.prompt or "", True, card.context_length)
    completion = body.completion_token_ids or body.tokens or encode(body.output or "", False, card.context_length)
    check_ids(prompt, card.vocab_size, f"{param}.prompt_token_ids")
    check_ids(completion, card.vocab_size, f"{param}.completion_token_ids")
    advantages = _of_each_token(body.advantages, len(completion))
    for name, values in (("logprobs", body.given_logprobs), ("advantages", advantages)):
        if values and len(values) != len(completion):
            raise InvalidRequestError(
                f"{param}.{name}: there must be one for each of the {len(completion)} tokens of the completion; send "
                f"`tokens` in place of `output`, or no {name}.",
                param=f"{param}.{name}",
            )
    return _given(body, services, param, prompt, completion, body.given_logprobs, advantages)


def _row(
    body: GivenTrajectoryBody, ids: list[int], mask: list[bool], services: Services, param: str
) -> GivenTrajectory:
    """The tokens before the first sampled one are the prompt."""
    check_ids(ids, services.models.first.card.vocab_size, f"{param}.token_ids")
    start = mask.index(True)
    advantages = _of_each_token(body.advantages, len(ids))
    return _given(
        body,
        services,
        param,
        ids[:start],
        ids[start:],
        body.given_logprobs[start:],
        advantages[start:],
        () if all(mask[start:]) else tuple(mask[start:]),
    )


def _of_each_token(advantages: float | list[float] | None, tokens: int) -> list[float]:
    if advantages is None:
        return []
    return advantages if isinstance(advantages, list) else [advantages] * tokens


def _given(
    body: GivenTrajectoryBody,
    services: Services,
    param: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float],
    advantages: Sequence[float],
    mask: tuple[bool, ...] = (),
) -> GivenTrajectory:
    tokens, context = len(prompt) + len(completion), services.models.first.card.context_length
    if tokens > context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens, and {param} has {tokens}. Leave it out.",
            param=param,
        )
    return GivenTrajectory(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        reward=body.reward,
        group_id=body.group_id,
        sampling_logprobs=tuple(logprobs),
        temperature=body.temperature,
        adapter=_version(body.lora_version, services, f"{param}.lora_version"),
        mask=mask,
        advantages=tuple(advantages),
        episode_id=body.episode_id,
    )


def _version(selector: str | None, services: Services, param: str) -> AdapterRef | None:
    if selector is None:
        return None
    return BASE_ADAPTER if services.is_base(selector) else services.find(selector, param).ref


MAX_LISTED = 1000

log = logging.getLogger(__name__)
router = Router()


# -- update ----------------------------------------------------------------------------------------


@router.post(
    "/v1/training/update",
    role=Role.TRAIN,
    audited=True,
    examples={
        "what waits": {},
        "given": {
            "trajectories": [
                {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "reward": 1, "group_id": "a"},
                {"prompt_token_ids": [1, 2], "completion_token_ids": [5, 4], "reward": 0, "group_id": "a"},
            ]
        },
        "rows of tokens": {
            "trajectories": [
                {"token_ids": [1, 2, 3, 4, 1, 5], "mask": [0, 0, 1, 1, 0, 1], "advantages": 0.5},
                {"token_ids": [1, 2, 5, 4], "mask": [0, 0, 1, 1], "advantages": -0.5},
            ]
        },
    },
)
async def update(
    body: Annotated[UpdateBody, Depends(json_body(UpdateBody, required=False))],
    request: Request,
    services: ServicesDep,
    training: TrainingDep,
) -> UpdateReport:
    """Makes one update now, with the complete groups or with the given trajectories, whose tokens count as those of a
    prompt. When the answer comes, the update has ended, and a version that it published is live."""
    given = None
    with ExitStack() as charged:
        if body.given is not None:
            account = record_of(request.scope).account = services.accounts.of(services.key)
            charged.enter_context(account.request())
            encode = partial(given_trajectories, body.given, services)
            given = await services.workers.run(request.state.body_bytes, encode)
            account.add_prompt(sum(len(each.prompt_ids) + len(each.completion_ids) for each in given))
        with adapter_named_by("lora_adapter", body.lora_adapter):
            updating = training.update(
                body.lora_adapter,
                given,
                body.update_inference,
                body.checkpoint_name,
                body.signal,
                reader=services.key.reader,
            )
            return await services.lifecycle.run_to_end(updating)


# -- feedback --------------------------------------------------------------------------------------


@router.post("/v1/training/feedback", role=Role.TRAIN, examples={"a reward": {"trajectory_id": "traj-0", "score": 1}})
async def feedback(
    body: Annotated[FeedbackBody, Depends(json_body(FeedbackBody))], services: ServicesDep, collection: CollectionDep
) -> FeedbackObject:
    """Sets the reward of an answer, an episode, a turn or the tokens of an answer. The last feedback before training
    counts; of an answer or a turn, the last one of each `user`, and the reward is their mean. If a request had neither
    a `scoring_function` nor a `group_id` or `episode_id`, feedback on one of its answers is enough to train on its
    group. The answer comes when the reward is on the disk, so that a crash does not lose it. If the answer was dropped
    as too old or unrated, the feedback is late and counts all the same. It is 409 if the answer was trained on."""
    score = math.fsum(body.token_rewards or ()) if body.score is None else body.score
    reader = services.key.reader
    of_people: dict[str, Any] = {}
    if body.episode_id is not None:
        await collection.reward_episode(body.episode_id, body.group_id or "", score, reader)
    elif body.token_rewards is not None:
        await collection.reward_tokens(body.trajectory_id or "", body.token_rewards, reader)
    else:
        card = await collection.feedback(body.trajectory_id or "", score, body.user or "", reader)
        of_people = {"reward": card.reward, "people": card.people, "late": card.late}
    return FeedbackObject(
        status="success", trajectory_id=body.trajectory_id, episode_id=body.episode_id, score=score, **of_people
    )


@router.post("/v1/training/groups/{group_id:path}/close", role=Role.TRAIN)
async def close_group(
    group_id: Annotated[str, Path(max_length=MAX_EPISODE_ID, description="The `group_id` of its requests.")],
    services: ServicesDep,
    collection: CollectionDep,
) -> GroupCard:
    """Lets no more answers into a group, so that it can be trained on. If its requests named a `scoring_function`, that
    rewards the members without a reward; otherwise they are dropped. The answer is 409 if the group was trained on or
    dropped."""
    return await collection.close_group(group_id, services.key.reader)


# -- control ---------------------------------------------------------------------------------------

Control = Annotated[ControlBody, Depends(json_body(ControlBody, required=False))]


@router.post("/v1/training/start", role=Role.TRAIN, audited=True, examples={"default adapter": {}})
async def start(body: Control, services: ServicesDep, training: TrainingDep) -> TrainingObject:
    """Trains this adapter too, from its live version or, if there is none, from the base model."""
    return await _control(body, services, training.start)


@router.post(
    "/v1/training/stop",
    role=Role.TRAIN,
    audited=True,
    examples={"one that is not the default": {"lora_adapter": "math"}},
)
async def stop(body: Control, services: ServicesDep, training: TrainingDep) -> TrainingObject:
    """Ends the training of an adapter, and its lesson, after the update that is being made. What it has learnt is
    saved, and its live version stays live; trajectories that wait are dropped. The default adapter is in training as
    long as the server trains (409)."""
    return await _control(body, services, partial(stop_teaching, services, training))


async def stop_teaching(
    services: Services, training: TrainingService, adapter: str | None, *, reader: Reader
) -> TrainingStatus:
    """Stops the lesson of an adapter, if it has one, and then its training. That of the default adapter stays."""
    lessons: Lessons | None = services.extra("lessons")
    card = lessons.card(reader) if lessons is not None and adapter != training.default_adapter else None
    if lessons is not None and card is not None and card.is_running and card.adapter == adapter:
        await lessons.stop(reader)
    return await training.stop(adapter, reader=reader)


@router.post("/v1/training/pause", role=Role.TRAIN, audited=True, examples={"default adapter": {}})
async def pause(body: Control, services: ServicesDep, training: TrainingDep) -> TrainingObject:
    """Stops automatic updates; trajectories are still collected."""
    return await _control(body, services, training.pause)


@router.post("/v1/training/resume", role=Role.TRAIN, audited=True, examples={"default adapter": {}})
async def resume(body: Control, services: ServicesDep, training: TrainingDep) -> TrainingObject:
    """Restarts automatic updates."""
    return await _control(body, services, training.resume)


@router.post("/v1/training/rollback", role=Role.TRAIN, audited=True, examples={"the best version": {}})
async def roll_back(
    body: Annotated[TrainingRollbackBody, Depends(json_body(TrainingRollbackBody, required=False))],
    services: ServicesDep,
    training: TrainingDep,
) -> TrainingObject:
    """Serves the best version, or a checkpoint, and continues training from it."""
    reader = services.key.reader
    with adapter_named_by("lora_adapter", body.lora_adapter):
        training.status(body.lora_adapter, reader=reader)  # an unknown one is no error of `to`
    with adapter_named_by("to", body.to):
        rolling_back = training.rollback(body.lora_adapter, body.to, reader=reader)
        return _status(await services.lifecycle.run_to_end(rolling_back), services)


async def _control(
    body: ControlBody, services: Services, change: Callable[..., Coroutine[Any, Any, TrainingStatus]]
) -> TrainingObject:
    with adapter_named_by("lora_adapter", body.lora_adapter):
        changing = change(body.lora_adapter, reader=services.key.reader)
        return _status(await services.lifecycle.run_to_end(changing), services)


def _status(status: TrainingStatus, services: Services) -> TrainingObject:
    return status_object(status, services.routed_adapter())


# -- status ----------------------------------------------------------------------------------------


@router.get("/v1/training/status", role=Role.TRAIN)
async def status(
    services: ServicesDep,
    lora_adapter: Annotated[str | None, Query(description="A trained adapter. Default: the default adapter.")] = None,
) -> TrainingObject:
    """The training of one adapter."""
    if services.training is None:
        return _status(TrainingStatus(), services)
    with adapter_named_by("lora_adapter", lora_adapter):
        return _status(services.training.status(lora_adapter, reader=services.key.reader), services)


@router.get("/debug/training", role=Role.ADMIN)
async def debug_training(services: ServicesDep) -> DebugTraining:
    """The status of every trained adapter, with details."""
    statuses, current = services.training_statuses(), services.routed_adapter()
    adapters = [DebugAdapterTraining(**fields_of(status_object(status, current))) for status in statuses]
    return DebugTraining(training_enabled=bool(statuses), adapters=adapters)


@router.get("/debug/trajectories", role=Role.ADMIN)
async def debug_trajectories(
    services: ServicesDep, limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Maximum number.")] = 20
) -> DebugTrajectories:
    """The newest trajectories with their prompts and answers, newest first."""
    newest = services.training.trajectories.buffer.newest(limit) if services.training else ()
    return DebugTrajectories(object="list", data=[trajectory_object(*each) for each in newest])


# -- events ----------------------------------------------------------------------------------------


@router.get(
    "/v1/training/events",
    role=Role.TRAIN,
    response_class=Response,
    responses={
        200: {"content": EVENTS, "description": "Server-sent events."},
    },
)
async def events(
    services: ServicesDep,
    training: TrainingDep,
    last_event_id: Annotated[
        str, Header(max_length=64, description="The `id` of the last event that the client has had.")
    ] = "",
) -> Response:
    """The events of training from now on. A client that comes back sends the header `Last-Event-ID`, as browsers do,
    and gets what it has missed first. If that is more than 256 events, or if it reads too slowly, an event
    `events_lost` replaces those that it missed."""
    return TrainingEventsResponse(training, services.lifecycle, last_event_id, services.key.reader)


_EVENT = TypeAdapter(TrainingEvent)


class TrainingEventsResponse(Response):
    """A stream that ends when the client disconnects, the server drains, or training ends its events.

    Args:
        after, reader: see `rl.service.TrainingService.events`.
    """

    def __init__(self, training: TrainingService, lifecycle: Lifecycle, after: str, reader: Reader) -> None:
        super().__init__()
        self._training = training
        self._lifecycle = lifecycle
        self._after, self._reader = after, reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lifecycle.drain_begun.is_set():
            raise DrainingError("draining")
        record_of(scope).waits = True
        # `rl.service.TrainingService` promises aclose() on this iterator.
        events = self._training.events(self._after, reader=self._reader)
        stream = EventStream(send, {})
        async with aclosing(cast(AsyncGenerator[TrainingEvent, None], events)), stream.opened():
            try:
                async with while_connected(receive, self._lifecycle.drain_begun):
                    async for event in events:
                        await stream.write(sent_event(_EVENT.dump_json(event).decode(), event.kind, event.id))
            except ClientDisconnect:
                return
            except DrainingError:
                pass
            except Exception as error:  # the status line is sent already, so the error goes into the stream
                log.exception("a stream of training events failed")
                await stream.write(sent_event(error_body(error).json_text(), "error"))
            await stream.end()
