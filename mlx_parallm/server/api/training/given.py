"""What training gets of the trajectories that a client sends: token ids, checked against the model."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.core import BASE_ADAPTER, AdapterRef, GivenTrajectory
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.server.api.training.trajectory_schema import GivenTrajectoryBody
from mlx_parallm.server.planning import check_ids
from mlx_parallm.server.services import Services


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
    card, encode = services.first.card, services.first.tokenizer.encode
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
    check_ids(ids, services.first.card.vocab_size, f"{param}.token_ids")
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
    tokens, context = len(prompt) + len(completion), services.first.card.context_length
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
