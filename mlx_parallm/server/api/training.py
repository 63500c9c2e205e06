"""`/v1/training`: feedback, groups, control, status, history and events; `/debug/training`.

A change runs to its end even if the client disconnects. If the server does not train, the status routes still answer,
and all others answer 409.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from fastapi import Depends, Header, Path, Query
from pydantic import Field, TypeAdapter, model_validator
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_parallm.core.adapters import AdapterRef, AdapterText
from mlx_parallm.core.json_values import Figure, JsonObject, fields_of
from mlx_parallm.core.readers import Reader
from mlx_parallm.core.trajectories import GroupCard
from mlx_parallm.rl.status import TrainingEvent, TrainingHistory, TrainingStatus
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.bodies import MAX_EPISODE_ID
from mlx_parallm.server.api.fields import (
    INT32_MAX,
    MAX_NAME,
    Name,
    WireInput,
    WireOutput,
    refused,
)
from mlx_parallm.server.body import json_body
from mlx_parallm.server.errors import DrainingError, error_body
from mlx_parallm.server.openapi import EVENTS
from mlx_parallm.server.request import adapter_named_by
from mlx_parallm.server.request_log import record_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import CollectionDep, Lifecycle, Services, ServicesDep, TrainingDep
from mlx_parallm.server.streams import EventStream, sent_event, while_connected

if TYPE_CHECKING:
    from mlx_parallm.extras.lessons.service import Lessons
    from mlx_parallm.rl.service import TrainingService

log = logging.getLogger(__name__)
router = Router()


class ControlBody(WireInput):
    """The adapter to control."""

    lora_adapter: str | None = None
    """The adapter. By default, the default adapter."""


class TrainingRollbackBody(ControlBody):
    """The version to go back to."""

    to: str | None = None
    """A checkpoint's name or tag. By default, the best version."""


class FeedbackBody(WireInput):
    """The reward of an answer, of an episode, of one turn of it, or of the tokens of one answer or turn."""

    trajectory_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = None
    """The id of an answer, from the response of the request that was collected. If the answer is a turn of an episode,
    its reward adds to that of the episode."""
    episode_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """An episode, in place of `trajectory_id`. Its reward ends it."""
    group_id: Annotated[str, Field(min_length=1, max_length=MAX_EPISODE_ID)] | None = None
    """The group of `episode_id`, if its requests named one."""
    score: float | None = None
    """The reward: any finite number."""
    token_rewards: Annotated[list[float], Field(min_length=1, max_length=INT32_MAX)] | None = None
    """In place of `score`, with `trajectory_id`: one reward for each token of the answer. Each counts for its token and
    for those before it."""
    user: Name | None = None
    """With `trajectory_id` and `score`: whose opinion this is. The last one of each user counts, and the reward is the
    mean over users. All that is sent without a `user` is the opinion of one."""

    @model_validator(mode="after")
    def _names_one(self) -> FeedbackBody:
        if (self.trajectory_id is None) == (self.episode_id is None):
            raise refused("send this or episode_id, and not both", "trajectory_id")
        if (self.score is None) == (self.token_rewards is None):
            raise refused("send this or token_rewards, and not both", "score")
        if self.group_id is not None and self.episode_id is None:
            raise refused("needs episode_id", "group_id")
        if self.token_rewards is not None and self.trajectory_id is None:
            raise refused("needs trajectory_id", "token_rewards")
        if self.user is not None and (self.trajectory_id is None or self.score is None):
            raise refused("needs trajectory_id and score", "user")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingObject(TrainingStatus):
    """The training of one adapter."""

    training_enabled: bool
    """Whether the server trains."""
    current_lora: AdapterText | None
    """The version with the largest share of the requests that name no adapter; it may be of another adapter. null: the
    base model."""
    loss: Figure | None
    """Loss of the last update. This and the fields down to `staleness` are null if not known."""
    reward_mean: Figure | None
    """Mean reward of the last update."""
    reward_std: Figure | None
    """Standard deviation of the rewards of the last update."""
    kl: Figure | None
    """KL divergence from the base model in nats a token; estimated from a sample of the tokens, unless it is part of
    the loss."""
    entropy: Figure | None
    """Entropy in nats a token."""
    clip_fraction: Figure | None
    """Share of tokens that were clipped, 0 to 1."""
    ratio: Figure | None
    """Mean importance ratio."""
    staleness: Figure | None
    """Mean number of versions between sampling and training."""


class FeedbackObject(WireOutput):
    """The reward that was set."""

    status: Literal["success"]
    trajectory_id: str | None = None
    """The answer that was rewarded."""
    episode_id: str | None = None
    """The episode that was rewarded."""
    score: float
    """The score that was sent; of `token_rewards`, their sum."""
    reward: float | None = None
    """With `trajectory_id` and `score`: the reward of the answer now, the mean of the last scores of all people. Late
    scores count as 1 or -1."""
    people: int | None = None
    """The number of people in that mean."""
    late: bool = False
    """The answer had been dropped, because it was too old or nobody had judged it. Its feedback is learnt from all the
    same, in updates of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugAdapterTraining(TrainingObject):
    """The training of one adapter, with details."""

    detail: JsonObject
    """The trainer's state, for people."""


class DebugTraining(WireOutput):
    """The training of all adapters, with details."""

    training_enabled: bool
    """Whether the server trains."""
    adapters: list[DebugAdapterTraining]
    """One for each trained adapter."""


FIGURES = ("loss", "reward_mean", "reward_std", "kl", "entropy", "clip_fraction", "staleness")
"""Metrics of the last update that are also fields of the status, under the same names."""


def status_object(status: TrainingStatus, current: AdapterRef | None) -> TrainingObject:
    """Makes the response object of a status.

    `current` is the version that requests get if they name no adapter; None is the base model.
    """
    figures: dict[str, Any] = {name: status.metrics.get(name) for name in FIGURES}
    return TrainingObject(
        **fields_of(status),
        **figures,
        training_enabled=status.state != "disabled",
        current_lora=current,
        ratio=status.metrics.get("ratio_mean"),
    )


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
    saved, and stays live or, if it was not published, goes live; trajectories that wait are dropped. The default
    adapter is in training as long as the server trains (409)."""
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


# -- history ---------------------------------------------------------------------------------------

MAX_EVENTS, MAX_METRICS, MAX_METRIC = 2000, 64, 128

Metrics = Annotated[
    list[Annotated[str, Field(max_length=MAX_METRIC)]] | None,
    Query(max_length=MAX_METRICS, description="A metric that is wanted; may be repeated. Default: all metrics."),
]


@router.get("/v1/training/history", role=Role.TRAIN)
async def history(
    services: ServicesDep,
    training: TrainingDep,
    lora_adapter: Annotated[str | None, Query(description="A trained adapter. Default: the default adapter.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS, description="Maximum number of events.")] = 500,
    metric: Metrics = None,
) -> TrainingHistory:
    """What has happened in the training of an adapter since the run began, as the events that reported it. The stream
    of events continues from there."""
    with adapter_named_by("lora_adapter", lora_adapter):
        history = training.history(lora_adapter, limit, reader=services.key.reader)
    return replace(history, data=tuple(_with_metrics(event, metric) for event in history.data))


def _with_metrics(event: TrainingEvent, wanted: Collection[str] | None) -> TrainingEvent:
    """The event with those of its metrics that are wanted. None keeps all."""
    if wanted is None or "metrics" not in event.data:
        return event
    kept = {name: value for name, value in event.data["metrics"].items() if name in wanted}
    return replace(event, data={**event.data, "metrics": kept})
