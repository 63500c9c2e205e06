"""`/v1/training/trajectories`: the groups that were collected, as a list in pages, and one of them in full. Tokens are
decoded in worker threads, and how many one answer has is bounded."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import TypeAdapter
from starlette.responses import Response

from mlx_parallm.core.json_values import fields_of
from mlx_parallm.core.text import TextTokenizer
from mlx_parallm.core.trajectories import Trajectory
from mlx_parallm.rl.reading import CollectedGroup, CollectedSample, CollectedTurn, GroupFilter, GroupPage, GroupRow
from mlx_parallm.rl.trajectories import TrajectoryState
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.adapters.schema import MAX_NAME
from mlx_parallm.server.api.training.collected.schema import (
    CollectedGroupObject,
    CollectedSampleObject,
    CollectedTurnObject,
    GroupPageObject,
    GroupRowObject,
    TokenObject,
)
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import ServicesDep, TrainingDep

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
    `rl_training.trajectory_buffer_size` says. A key sees what it has sent itself, and what the server has drawn for
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
