"""Wire body and prompt ids → `core.GenerationRequest`: what only the model's card can check is checked here."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.core import (
    AdapterRef,
    Collection,
    GenerationRequest,
    Grammar,
    ModelCard,
    SamplingParams,
    StopParams,
    TrainingClient,
)
from mlx_parallm.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.server.wire.common import GenerationBody

SEED_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class Budget:
    """How many tokens may be generated: what was asked for, or a default that shrinks to fit (None: all the room)."""

    asked: int | None
    default: int | None

    def resolve(self, longest_prompt: int, context: int) -> int:
        """`max_tokens`. Raises ContextLengthError when the context cannot hold it, or not even one token."""
        room = context - longest_prompt
        if self.asked is None and room >= 1:
            return room if self.default is None else min(self.default, room)
        wanted = 1 if self.asked is None else self.asked
        if wanted > room:
            raise ContextLengthError(
                f"This model's context is {context} tokens, and the request needs {longest_prompt + wanted}: "
                f"{longest_prompt} in the prompt and {wanted} to generate. Shorten the prompt or ask for fewer tokens.",
                param="max_tokens" if longest_prompt < context and self.asked else None,
            )
        return wanted


def plan(
    request_id: str,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    card: ModelCard,
    adapter: AdapterRef,
    budget: Budget,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
    collection: Collection | None,
    grammar: Grammar | None,
    spelled: frozenset[int] = frozenset(),
) -> GenerationRequest:
    """The engine's request. `top_logprobs` and `prompt_logprobs` are what the engine has to report, None for nothing.

    Raises:
        ContextLengthError: the longest prompt and the budget do not fit the context.
        InvalidRequestError: an empty prompt, an id beyond the vocabulary, or min_tokens over max_tokens.
    """
    max_tokens = budget.resolve(max(map(len, prompts)), card.context_length)
    for ids in prompts:
        check_ids(ids, card.vocab_size)
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({body.min_tokens}) is over max_tokens ({max_tokens}).", param="min_tokens"
        )
    return GenerationRequest(
        request_id=request_id,
        prompts=tuple(tuple(ids) for ids in prompts),
        sampling=_sampling(body, card.vocab_size, top_logprobs),
        stopping=StopParams(max_tokens, body.min_tokens, tuple(body.stop), body.ignore_eos),
        n=body.n,
        prompt_logprobs=prompt_logprobs,
        adapter=adapter,
        priority=body.priority,
        collection=collection,
        grammar=grammar,
        spelled=spelled,
    )


async def collection_of(
    body: GenerationBody, training: TrainingClient, adapter: AdapterRef, client: str
) -> Collection | None:
    """What the body marks for training, None where it does not.

    Raises:
        OverloadedError, InvalidRequestError, ConflictError, TrainingDisabledError: it cannot be collected; see
            `TrainingClient.check`.
    """
    if not body.collect_trajectory:
        return None
    collection = Collection(body.scoring_function, body.metadata or {}, client)
    await training.check(collection, adapter)
    return collection


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raises InvalidRequestError unless there is at least one id, and the vocabulary has them all."""
    if not ids:
        raise InvalidRequestError("The prompt has no tokens; send at least one.", param=param)
    if max(ids) >= vocab_size:
        raise InvalidRequestError(f"Token id {max(ids)} is not below the vocabulary's size, {vocab_size}.", param=param)


def _sampling(body: GenerationBody, vocab_size: int, top_logprobs: int | None) -> SamplingParams:
    if any(token_id >= vocab_size for token_id in body.logit_bias):
        raise InvalidRequestError(f"Token ids must be below the vocabulary's size, {vocab_size}.", param="logit_bias")
    greedy = body.top_p == 0
    return SamplingParams(
        temperature=0.0 if greedy else body.temperature,
        top_k=max(0, min(body.top_k, vocab_size)),
        top_p=1.0 if greedy else body.top_p,
        min_p=body.min_p,
        seed=secrets.randbits(64) if body.seed is None else body.seed % SEED_SPACE,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(sorted(body.logit_bias.items())),
        top_logprobs=top_logprobs,
    )
