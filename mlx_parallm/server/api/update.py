"""`POST /v1/training/update`: one update now, with what was collected, or with trajectories that the client sends.

A trajectory that a client sends is a prompt and a completion, or one row of tokens:

    prompt_token_ids [5, 6]   completion_token_ids [7, 2]                          one answer
    token_ids [5, 6, 7, 2, 8, 9, 3, 2]   mask [0, 0, 1, 1, 0, 0, 1, 1]             two turns, with a tool result between

The second form is the one in which prime-rl, verifiers, TRL and Atropos keep rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated

from fastapi import Depends
from pydantic import Field, PlainValidator, model_validator
from starlette.requests import Request

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import Signal
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.rl.status import UpdateReport
from mlx_parallm.server.access import Role
from mlx_parallm.server.api.bodies import MAX_EPISODE_ID, MAX_TEMPERATURE, MIN_COLLECTED_TEMPERATURE
from mlx_parallm.server.api.fields import MAX_NAME, Name, NonEmptyTokenIds, WireInput, refused
from mlx_parallm.server.body import json_body
from mlx_parallm.server.request import adapter_named_by, check_ids
from mlx_parallm.server.request_log import record_of
from mlx_parallm.server.routing import Router
from mlx_parallm.server.services import Services, ServicesDep, TrainingDep

MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0, but float32 sums can be slightly above."""

Logprob = Annotated[float, Field(le=MAX_LOGPROB)]


def _mask(value: object) -> list[bool]:
    if isinstance(value, list) and all(type(one) in (int, bool) and one in (0, 1) for one in value):
        return [bool(one) for one in value]
    raise refused("must be a list of 0 and 1")


Mask = Annotated[list[bool], PlainValidator(_mask, json_schema_input_type=list[Annotated[int, Field(ge=0, le=1)]])]


def _check_logprobs(trained: Sequence[float | None]) -> None:
    """Checks the values of the field `logprobs` that belong to trained tokens."""
    if None in trained:
        raise refused("null is for context; a token that was sampled needs the log-probability of its draw", "logprobs")
    if any(value is not None and value > MAX_LOGPROB for value in trained):
        raise refused("a log-probability is at most 0; one of a sampled token is greater", "logprobs")


class GivenTrajectoryBody(WireInput):
    """A trajectory that the client sends: a prompt and a completion, each given once as token ids or as text; or
    `token_ids` with a `mask`."""

    prompt_token_ids: NonEmptyTokenIds | None = None
    """Token ids of the prompt, at least one."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """The prompt as text. It is encoded like a prompt of `/v1/completions`."""
    completion_token_ids: NonEmptyTokenIds | None = None
    """Token ids of the completion, at least one."""
    tokens: NonEmptyTokenIds | None = None
    """Another name for `completion_token_ids`."""
    output: Annotated[str, Field(min_length=1)] | None = None
    """The completion as text. It is encoded without special tokens, so an answer that the model ended lacks the
    end-of-sequence token. The tokens may differ from those that were sampled; `tokens` are exact."""
    token_ids: NonEmptyTokenIds | None = None
    """In place of prompt and completion: all tokens of one row, in which there may be several sampled stretches."""
    mask: Mask | None = None
    """With `token_ids`, one for each of them: 1 for tokens that were sampled and are trained, 0 for context, such as
    the prompt and the results of tools. The first is 0."""
    reward: float | None = None
    """The reward. It may be left out for the loss cross_entropy, which does not use rewards, and with `advantages`."""
    advantages: float | list[float] | None = None
    """Taken as they are, in place of those computed from rewards: one number, or one for each token of the completion
    (or of `token_ids`; those of context are not read). Either all trajectories have them or none has."""
    group_id: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """The group: trajectories of one prompt, whose rewards are compared. Trajectories without a `group_id` are grouped
    by their prompts."""
    episode_id: Annotated[str, Field(max_length=MAX_EPISODE_ID)] = ""
    """Trajectories of one group with the same id are one episode, in the order in which they are sent, and count once
    in their group. One that continues the tokens of an earlier one is joined to it. The reward of the episode is given
    with one of them, or the same with each."""
    sampling_logprobs: list[Logprob] | None = None
    """Log-probabilities in nats, one for each completion token, of the distribution that it was sampled from. If
    they are left out, the trainer computes those of the current policy, as if it had sampled the completion."""
    logprobs: list[float | None] | None = None
    """Another name for `sampling_logprobs`. With `token_ids`, one for each of them; those of context are not read and
    may be null."""
    lora_version: str | None = None
    """The adapter version that sampled the completion, such as `math@3` or `base`. It is refused unless training
    continued from it and it is at most `max_staleness` versions old. The default: the trajectory counts as new."""
    temperature: Annotated[float, Field(ge=MIN_COLLECTED_TEMPERATURE, le=MAX_TEMPERATURE)] = 1.0
    """The temperature of sampling."""

    @model_validator(mode="after")
    def _fits_together(self) -> GivenTrajectoryBody:
        if self.sampling_logprobs is not None and self.logprobs is not None:
            raise refused("is the same as sampling_logprobs; send one of them", "logprobs")
        if self.token_ids is None:
            self._check_answer()
        else:
            self._check_row(len(self.token_ids))
        return self

    def _check_answer(self) -> None:
        self._one_of("prompt_token_ids", "prompt")
        self._one_of("completion_token_ids", "tokens", "output")
        if self.mask is not None:
            raise refused("needs token_ids", "mask")
        _check_logprobs(self.logprobs or ())
        ids = self.completion_token_ids or self.tokens
        for name in ("sampling_logprobs", "logprobs", "advantages"):
            values = getattr(self, name)
            if ids is not None and isinstance(values, list) and len(values) != len(ids):
                raise refused("must have one entry for each completion token", name)

    def _check_row(self, tokens: int) -> None:
        for name in ("prompt_token_ids", "prompt", "completion_token_ids", "tokens", "output"):
            if getattr(self, name) is not None:
                raise refused("is part of token_ids already; send one of them", name)
        if self.mask is None:
            raise refused("must say with 1 which of token_ids were sampled", "mask")
        for name in ("mask", "sampling_logprobs", "logprobs", "advantages"):
            values = getattr(self, name)
            if isinstance(values, list) and len(values) != tokens:
                raise refused(f"must have one entry for each of the {tokens} token_ids", name)
        if self.mask[0] or not any(self.mask):
            raise refused("must begin with 0, because nothing predicts the first token, and have a 1", "mask")
        _check_logprobs([value for value, trained in zip(self.logprobs or (), self.mask, strict=False) if trained])

    def _one_of(self, *fields: str) -> None:
        if sum(getattr(self, field) is not None for field in fields) != 1:
            raise refused(f"send one of {', '.join(fields)}", fields[0])

    @property
    def given_logprobs(self) -> list[float]:
        """`sampling_logprobs` under either name, 0 in place of null; empty if they were left out."""
        return self.sampling_logprobs or [value or 0.0 for value in self.logprobs or ()]


MAX_GIVEN = 4096
GivenTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_GIVEN)]


class UpdateBody(WireInput):
    """One update."""

    trajectories: Annotated[list[GivenTrajectoryBody], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """The training data. If it is left out, the complete groups that were collected are used. Either all trajectories
    (or episodes) have a reward or none has."""
    prompts: GivenTexts | None = None
    """The training data as three lists of the same length, in place of `trajectories`: prompts as text, one completion
    for each in `outputs`, and its reward in `rewards`. Equal prompts are one group."""
    outputs: GivenTexts | None = None
    """One completion for each of `prompts`, as text."""
    rewards: Annotated[list[float], Field(min_length=1, max_length=MAX_GIVEN)] | None = None
    """One reward for each of `prompts`."""
    update_inference: bool = True
    """Whether the new version becomes live."""
    checkpoint_name: Name | None = None
    """A tag. After the update, even if it was held or skipped, the adapter is saved as a checkpoint with this tag. If
    it cannot be saved, the answer is an error."""
    lora_adapter: str | None = None
    """The adapter to train. By default, the default adapter."""
    signal: Annotated[Signal, Field(strict=False)] | None = None
    """What the update learns from, without given data: answers with `rewards`, `late_feedback`, `preferences` or
    `corrections`. The default: rewards or, if no answer with one waits, the first of the others that do."""

    @property
    def given(self) -> list[GivenTrajectoryBody] | None:
        """The training data in either form."""
        if self.prompts is None or self.outputs is None:
            return self.trajectories
        rewards: Sequence[float | None] = self.rewards or [None] * len(self.prompts)
        return [
            GivenTrajectoryBody(prompt=prompt, output=output, reward=reward)
            for prompt, output, reward in zip(self.prompts, self.outputs, rewards, strict=True)
        ]

    @model_validator(mode="after")
    def _lists_of_one_length(self) -> UpdateBody:
        lists = {"prompts": self.prompts, "outputs": self.outputs, "rewards": self.rewards}
        given = {name: values for name, values in lists.items() if values is not None}
        if self.signal is not None and (given or self.trajectories is not None):
            raise refused("is for what waits; leave it out with given data", "signal")
        if not given:
            return self
        if self.trajectories is not None:
            raise refused("send trajectories, or the three lists", next(iter(given)))
        if "prompts" not in given or "outputs" not in given:
            raise refused("prompts and outputs need each other", next(iter(given)))
        if len({len(values) for values in given.values()}) > 1:
            raise refused("prompts, outputs and rewards must have the same length", "outputs")
        return self

    @model_validator(mode="after")
    def _given_alike(self) -> UpdateBody:
        alone = [given for given in self.trajectories or () if not given.episode_id]
        if len({given.reward is None for given in alone}) > 1:
            raise refused("give a reward with each of them, or with none", "trajectories")
        if len({given.advantages is None for given in self.trajectories or ()}) > 1:
            raise refused("give advantages with each of them, or with none", "trajectories")
        return self


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
        owner=services.key.name,
    )


def _version(selector: str | None, services: Services, param: str) -> AdapterRef | None:
    if selector is None:
        return None
    return BASE_ADAPTER if services.is_base(selector) else services.find(selector, param).ref


router = Router()


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
