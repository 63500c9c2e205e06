"""The body of a trajectory that a client sends with `POST /v1/training/update`: a prompt and a completion, or one row
of tokens.

    prompt_token_ids [5, 6]   completion_token_ids [7, 2]                          one answer
    token_ids [5, 6, 7, 2, 8, 9, 3, 2]   mask [0, 0, 1, 1, 0, 0, 1, 1]             two turns, with a tool result between

The second form is the one in which prime-rl, verifiers, TRL and Atropos keep rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PlainValidator, model_validator

from mlx_parallm.server.api.adapters.schema import MAX_NAME
from mlx_parallm.server.api.fields import NonEmptyTokenIds, WireInput, refused
from mlx_parallm.server.api.generation_fields import MAX_EPISODE_ID, MIN_COLLECTED_TEMPERATURE

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
    they are left out, the trainer computes those of the current policy, as if it had drawn the completion."""
    logprobs: list[float | None] | None = None
    """Another name for `sampling_logprobs`. With `token_ids`, one for each of them; those of context are not read and
    may be null."""
    lora_version: str | None = None
    """The adapter version that sampled the completion, such as `math@3` or `base`. It is refused unless training
    continued from it and it is at most `max_staleness` versions old. The default: the trajectory counts as new."""
    temperature: Annotated[float, Field(ge=MIN_COLLECTED_TEMPERATURE, le=2)] = 1.0
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
