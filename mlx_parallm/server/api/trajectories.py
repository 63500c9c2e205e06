"""`/v1/training/trajectories`: the groups that were collected, as a list in pages, and one of them in full. Tokens are
decoded in worker threads, and how many one answer has is bounded. `/debug/trajectories` has the newest trajectories as
they are.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import TypeAdapter
from starlette.responses import Response

from mlx_parallm.core.adapters import AdapterText
from mlx_parallm.core.json_values import Figure, JsonObject, UnixTime, fields_of
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.reading import (
    CollectedGroup,
    CollectedSample,
    CollectedTurn,
    EditedAnswer,
    GroupFilter,
    GroupPage,
    GroupRow,
    Thumbs,
)
from mlx_parallm.rl.trajectories import GroupMember, TrajectoryState
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.fields import MAX_NAME, FinishReasonText, WireOutput
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep, TrainingDep


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRowObject(GroupRow):
    """A group of trajectories in a list."""

    prompt: str
    """The beginning of its prompt; of a conversation, of the last message of the user."""
    created: UnixTime
    """Time of its first answer in ISO-8601, UTC."""


class GroupPageObject(WireOutput):
    """A page of a list of groups."""

    object: Literal["list"]
    data: list[GroupRowObject]
    """Newest first."""
    has_more: bool
    """Whether older ones follow. They come with the last `number` of this page as `after`."""


class TokenObject(WireOutput):
    """One token of an answer."""

    text: str
    """The text that it adds; empty while a character is incomplete. Special tokens are written out."""
    logprob: Figure | None
    """Log-probability in nats when it was sampled; null if that is unknown."""
    advantage: Figure | None
    """Its advantage in the last update that took the answer; null if there was none."""
    context: bool = False
    """It was not sampled and is not trained, such as the result of a tool."""


class CollectedTurnObject(WireOutput):
    """One answer; of an episode, one turn."""

    trajectory_id: str
    """Its id, for feedback and corrections."""
    lora_version: AdapterText | None
    """The version that sampled it; null if it is unknown."""
    context: str
    """What came before the answer after the group's prompt or the turn before; cut at its beginning if it is long."""
    text: str
    """The answer without special tokens, as far as its tokens are shown."""
    tokens: list[TokenObject]
    """Its first tokens."""
    tokens_left_out: int
    """Tokens after these, which are not shown."""
    temperature: float
    """The temperature of sampling."""
    finish_reason: FinishReasonText | None
    """Why it ended; null if that is unknown."""
    thumbs_up: int
    """People whose last score for it is above 0."""
    thumbs_down: int
    """People whose last score for it is 0 or less."""
    edits: Sequence[EditedAnswer]
    """What people wrote in its place, oldest first."""


class CollectedSampleObject(WireOutput):
    """One answer of a group, or one episode."""

    reward: Figure | None
    """Its reward; null if it has none."""
    advantage: Figure | None
    """How much better than expected it was, in the last update that took it; null if none has."""
    fate: TrajectoryState
    """What became of it; as that of a group."""
    reason: str
    """Why it was dropped; empty if it was not."""
    thumbs: Thumbs
    """What feedback on it does now. `count`: it is a reward. `count_late`: the sample was dropped, and is learnt from
    as late feedback. `nothing`: it is refused, because the sample was trained on, its update was refused, or it is an
    edit."""
    turns: list[CollectedTurnObject]
    """Its answer; of an episode, the last of its answers, in order."""
    turns_left_out: int
    """Turns before these, which are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedGroupObject(GroupRowObject):
    """A group of trajectories in full."""

    scoring_function: str | None
    """The scorer that rewards it; null if there is none."""
    full_prompt: str
    """The prompt as the model got it, with its special tokens; cut at its beginning if it is long."""
    prompt_tokens: int
    """Tokens of the prompt."""
    members: list[CollectedSampleObject]
    """Its first samples."""


MAX_EXCERPT = 160
"""Characters of a prompt in a list."""
MAX_SAMPLES = 64
"""Samples of a group that are shown: the first ones."""
MAX_TURNS = 16
"""Turns of an episode that are shown: the last ones."""
MAX_PROMPT_TOKENS = 4096
"""Tokens of a group's prompt that are shown: the last ones."""
MAX_TOKENS = 16_384
"""Tokens of the answers of a group that are shown, in all. Each turn gets an equal part, and as much for what came
before it."""

_EXCERPT_TOKENS = 96


# -- a page of the list --------------------------------------------------------------------------


_PAGE, _GROUP = TypeAdapter(GroupPageObject), TypeAdapter(CollectedGroupObject)


def page_json(page: GroupPage, tokenizer: TextTokenizer) -> bytes:
    """The text of a `GroupPageObject`. Call it in a worker thread, because the beginnings of prompts are decoded."""
    rows = [GroupRowObject(**_row(row, tokenizer)) for row in page.rows]
    return _PAGE.dump_json(GroupPageObject(object="list", data=rows, has_more=page.more), by_alias=True)


def _row(row: GroupRow, tokenizer: TextTokenizer) -> dict[str, Any]:
    return {**fields_of(row), "prompt": _excerpt(row.first, tokenizer), "created": row.first.created}


def _excerpt(first: Trajectory, tokenizer: TextTokenizer) -> str:
    asked = (message.get("content") for message in reversed(first.collection.messages) if message.get("role") == "user")
    text = next((content for content in asked if isinstance(content, str)), "") or first.collection.prompt_text
    text = text or tokenizer.decode(first.prompt_ids[:_EXCERPT_TOKENS], skip_special_tokens=True)
    return " ".join(text[: 2 * MAX_EXCERPT].split())[:MAX_EXCERPT]


# -- one group -----------------------------------------------------------------------------------


def group_json(group: CollectedGroup, tokenizer: TextTokenizer) -> bytes:
    """The text of a `CollectedGroupObject`. Call it in a worker thread, because all of it is decoded."""
    prompt = group.row.first.prompt_ids
    shown = sum(min(len(sample.turns), MAX_TURNS) for sample in group.samples)
    whole = CollectedGroupObject(
        **_row(group.row, tokenizer),
        scoring_function=group.scorer,
        full_prompt=tokenizer.decode(prompt[-MAX_PROMPT_TOKENS:]),
        prompt_tokens=len(prompt),
        members=[_sample(sample, prompt, MAX_TOKENS // shown, tokenizer) for sample in group.samples],
    )
    return _GROUP.dump_json(whole, by_alias=True, exclude_unset=True)


def _sample(
    sample: CollectedSample, prompt: tuple[int, ...], most: int, tokenizer: TextTokenizer
) -> CollectedSampleObject:
    """`most`: the tokens of each turn that are shown."""
    before = [prompt, *(turn.trajectory.prompt_ids + turn.trajectory.completion_ids for turn in sample.turns[:-1])]
    turns = [*zip(sample.turns, before, strict=True)][-MAX_TURNS:]
    return CollectedSampleObject(
        reward=sample.reward,
        advantage=sample.advantage,
        fate=sample.fate,
        reason=sample.reason,
        thumbs=sample.thumbs,
        turns=[_turn(turn, known, most, tokenizer) for turn, known in turns],
        turns_left_out=len(sample.turns) - len(turns),
    )


def _turn(turn: CollectedTurn, known: tuple[int, ...], most: int, tokenizer: TextTokenizer) -> CollectedTurnObject:
    """`known`: the tokens that are shown before it: the prompt of the group, or the turn before."""
    trajectory = turn.trajectory
    prompt, completion = trajectory.prompt_ids, trajectory.completion_ids[:most]
    context = prompt[len(known) :] if prompt[: len(known)] == known else prompt
    left_out = len(trajectory.completion_ids) - len(completion)
    whole = trajectory.text if not left_out else ""
    return CollectedTurnObject(
        trajectory_id=trajectory.trajectory_id,
        lora_version=trajectory.adapter,
        context=tokenizer.decode(context[-most:]) if context else "",
        text=whole or tokenizer.decode(completion, skip_special_tokens=True),
        tokens=_tokens(turn, completion, tokenizer),
        tokens_left_out=left_out,
        temperature=trajectory.temperature,
        finish_reason=None if trajectory.finish_reason is None else trajectory.finish_reason.value,
        thumbs_up=turn.up,
        thumbs_down=turn.down,
        edits=turn.edits,
    )


def _tokens(turn: CollectedTurn, ids: Sequence[int], tokenizer: TextTokenizer) -> list[TokenObject]:
    logprobs, mask = turn.trajectory.sampling_logprobs, turn.trajectory.mask
    made = []
    for at, text in enumerate(_pieces(ids, tokenizer)):
        if mask and not mask[at]:
            made.append(TokenObject(text=text, logprob=None, advantage=None, context=True))
            continue
        logprob = logprobs[at] if logprobs else None
        advantage = turn.advantages[at] if turn.advantages else None
        made.append(TokenObject(text=text, logprob=logprob, advantage=advantage))
    return made


def _pieces(ids: Sequence[int], tokenizer: TextTokenizer) -> list[str]:
    """The text that each token adds; empty for one whose last character is completed by a later one."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    pieces = [decode(tokenizer.token_bytes(token)) for token in ids]
    return [*pieces[:-1], pieces[-1] + decode(b"", True)] if pieces else []


MAX_ROWS, MAX_ID = 500, 256
_ROW_BYTES, _GROUP_BYTES = 512, 2**20
"""Rough estimates of the lengths of a row, and of a large group, as JSON."""

router = Router()

Name = Annotated[str | None, Query(max_length=MAX_NAME)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


@router.get("/v1/training/trajectories", role=Role.TRAIN, response_model=GroupPageObject)
async def groups(
    services: ServicesDep,
    training: TrainingDep,
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS, description="Maximum number of groups.")] = 100,
    after: Annotated[
        int | None, Query(ge=0, description="Only groups that are older than the one with this `number`.")
    ] = None,
    lora_adapter: Annotated[Name, Query(description="Only groups that train this adapter.")] = None,
    lora_version: Annotated[Name, Query(description="Only groups that this version drew, such as `math@3`.")] = None,
    fate: Annotated[TrajectoryState | None, Query(description="Only groups with this fate.")] = None,
    min_reward: Annotated[Reward, Query(description="Only groups with at least this mean reward.")] = None,
    max_reward: Annotated[Reward, Query(description="Only groups with at most this mean reward.")] = None,
) -> Response:
    """The groups of trajectories that wait for an update, and the last ones that were trained on or dropped since the
    server started; newest first. As many trajectories of each kind are kept as
    `rl_training.trajectory_buffer_size` says. A key sees what it has sent itself, and what the server has sampled for
    tasks of its own; an admin key sees everything."""
    wanted = GroupFilter(lora_adapter, lora_version, fate, min_reward, max_reward)
    page = await training.collected_groups.page(wanted, after, limit, services.key.reader)
    write = partial(page_json, page, services.models.first.tokenizer)
    return _json(await services.workers.run(_ROW_BYTES * len(page.rows), write))


@router.get("/v1/training/trajectories/{group_id:path}", role=Role.TRAIN, response_model=CollectedGroupObject)
async def group(
    group_id: Annotated[str, Path(max_length=MAX_ID, description="The id of a group, or of one of its trajectories.")],
    services: ServicesDep,
    training: TrainingDep,
) -> Response:
    """One group with its prompt and its samples: their tokens with log-probabilities and advantages, rewards, what
    became of them, and what people have said about them. Long texts are cut."""
    found = training.collected_groups.group(group_id, MAX_SAMPLES, services.key.reader)
    write = partial(group_json, found, services.models.first.tokenizer)
    return _json(await services.workers.run(_GROUP_BYTES, write))


def _json(text: bytes) -> Response:
    return Response(text, media_type="application/json")


# -- single trajectories ---


class DebugTrajectory(WireOutput):
    """One trajectory."""

    trajectory_id: str
    """Its id."""
    group_id: str
    """Id of its group: the trajectories of one prompt."""
    group_size: int
    """Number of trajectories that the group will have; 0 if that is not known."""
    episode_id: str | None
    """The episode that it is a turn of; null if there is none."""
    turn: int | None
    """Its place in the episode, if the request gave one."""
    lora_adapter: AdapterText | None
    """The adapter version that it was sampled from; `base@0` for the base model. null: unknown, it was sampled
    elsewhere."""
    state: TrajectoryState
    """`waiting` (for a reward), `scored`, `training`, `trained` or `dropped`."""
    reason: str
    """Why it was dropped; empty if it was not."""
    reward: Figure | None
    """Its reward; null if it has none yet."""
    scoring_function: str | None
    """The scorer that rewards it; null if its reward comes as feedback."""
    metadata: JsonObject
    """Data for the scorer."""
    prompt_token_ids: tuple[int, ...]
    """Token ids of the prompt."""
    completion_token_ids: tuple[int, ...]
    """Token ids of the completion, as sampled."""
    sampling_logprobs: tuple[Figure, ...]
    """Log-probabilities in nats, one for each completion token, of the distribution that it was sampled from."""
    temperature: float
    """The temperature of sampling."""
    text: str
    """Text of the completion."""
    finish_reason: FinishReasonText | None
    """Why the completion ended; null if it is unknown."""
    created: UnixTime
    """Time in ISO-8601, UTC."""


class DebugTrajectories(WireOutput):
    """The newest trajectories."""

    object: Literal["list"]
    data: list[DebugTrajectory]
    """Newest first."""


def trajectory_object(trajectory: Trajectory, member: GroupMember) -> DebugTrajectory:
    return DebugTrajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        episode_id=trajectory.collection.episode_id or None,
        turn=trajectory.collection.turn,
        lora_adapter=trajectory.adapter,
        state=member.state,
        reason=member.reason or "",
        reward=member.reward,
        scoring_function=trajectory.collection.scorer,
        metadata=trajectory.collection.metadata,
        prompt_token_ids=trajectory.prompt_ids,
        completion_token_ids=trajectory.completion_ids,
        sampling_logprobs=trajectory.sampling_logprobs,
        temperature=trajectory.temperature,
        text=trajectory.text,
        finish_reason=None if trajectory.finish_reason is None else trajectory.finish_reason.value,
        created=trajectory.created,
    )


MAX_LISTED = 1000


@router.get("/debug/trajectories", role=Role.ADMIN)
async def debug_trajectories(
    services: ServicesDep, limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Maximum number.")] = 20
) -> DebugTrajectories:
    """The newest trajectories with their prompts and answers, newest first."""
    newest = services.training.trajectories.buffer.newest(limit) if services.training else ()
    return DebugTrajectories(object="list", data=[trajectory_object(*each) for each in newest])
