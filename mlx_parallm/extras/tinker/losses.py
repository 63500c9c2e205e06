"""The losses of the Tinker API: from the arrays that a client sends to `core.TargetedTokens`, with checks.

Formulas and defaults: the pages on losses of Tinker's documentation. Every loss is a sum over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlx_parallm.core.engine import ModelCard
from mlx_parallm.core.summed import SummedLoss, TargetedTokens, TokenLoss
from mlx_parallm.errors import ContextLengthError, InvalidRequestError, shown
from mlx_parallm.extras.tinker.schema import LossBody
from mlx_parallm.server.request import check_ids

_CLIP_LOW, _CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
_CLIPPED = {TokenLoss.PPO: (0.8, 1.2), TokenLoss.CISPO: (0.0, 4.0)}
"""Losses with clip bounds, and Tinker's defaults for these. They bound the ratio itself."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A dense tensor. `shape`: None if it was not given: one dimension."""

    values: Sequence[float]
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TinkerDatum:
    """One sequence, and the arrays that the loss reads, by name."""

    tokens: tuple[int, ...]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class LossInput:
    """What a client computes a loss of."""

    data: Sequence[TinkerDatum]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)


def loss_input(body: LossBody) -> LossInput:
    data = [
        TinkerDatum(
            datum.model_input.ids(),
            {
                name: Tensor(tensor.data, None if tensor.shape is None else tuple(tensor.shape))
                for name, tensor in datum.loss_fn_inputs.items()
            },
        )
        for datum in body.data
    ]
    return LossInput(data, body.loss_fn, body.loss_fn_config)


def summed_loss(given: LossInput) -> SummedLoss:
    """The loss with its clip bounds.

    Raises:
        InvalidRequestError: this server does not have the loss, or the loss has no such setting.
    """
    losses = {str(loss): loss for loss in TokenLoss}
    if given.loss_fn not in losses:
        raise InvalidRequestError(
            f"loss_fn: {shown(given.loss_fn)} is not one of the losses of this server, {', '.join(losses)}", "loss_fn"
        )
    loss = losses[given.loss_fn]
    known = (_CLIP_LOW, _CLIP_HIGH) if loss in _CLIPPED else ()
    for name, value in given.config.items():
        if name not in known or isinstance(value, str):
            raise InvalidRequestError(
                f"loss_fn_config: {shown(name)} is not a number that {loss} has; it has {', '.join(known) or 'none'}",
                "loss_fn_config",
            )
    low, high = _CLIPPED.get(loss, (0.0, 0.0))
    low, high = float(given.config.get(_CLIP_LOW, low)), float(given.config.get(_CLIP_HIGH, high))
    if loss in _CLIPPED and not 0 <= low <= 1 <= high:
        raise InvalidRequestError(
            f"loss_fn_config: {_CLIP_LOW} must be between 0 and 1, and {_CLIP_HIGH} at least 1: they bound the ratio",
            "loss_fn_config",
        )
    return SummedLoss(loss, low, high)


def targeted_tokens(given: LossInput, loss: SummedLoss, card: ModelCard) -> list[TargetedTokens]:
    """The sequences with their targets.

    Raises:
        InvalidRequestError: an array that the loss reads is missing, or has another length than the tokens; a token is
            not in the vocabulary.
        ContextLengthError: a sequence is longer than the model's context.
    """
    if not given.data:
        raise InvalidRequestError("data: there is none; send at least one sequence", "data")
    return [_targeted(datum, f"data[{at}]", loss, card) for at, datum in enumerate(given.data)]


def _targeted(datum: TinkerDatum, place: str, loss: SummedLoss, card: ModelCard) -> TargetedTokens:
    imitates = loss.name is TokenLoss.CROSS_ENTROPY
    read = {"target_tokens", "weights"} if imitates else {"target_tokens", "logprobs", "advantages"}
    needed = {"target_tokens"} if imitates else read
    if missing := sorted(needed - datum.inputs.keys()):
        raise InvalidRequestError(f"{place}: {loss.name} reads loss_fn_inputs.{missing[0]}, which is missing", place)
    if unread := sorted(datum.inputs.keys() - read):
        raise InvalidRequestError(
            f"{place}: {loss.name} does not read loss_fn_inputs.{shown(unread[0])[1:-1]}; it reads "
            f"{', '.join(sorted(read))}",
            place,
        )
    length = len(datum.tokens)
    if length >= card.context_length:
        raise ContextLengthError(
            f"{place}: the model's context is {card.context_length} tokens, and this sequence has {length} and a "
            "target: shorten it",
            param=place,
        )
    values = {name: _one_dimension(tensor, name, place, length) for name, tensor in datum.inputs.items()}
    targets = tuple(int(token) for token in values["target_tokens"])
    for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
        check_ids(ids, card.vocab_size, f"{place}.{name}")
        if min(ids) < 0:
            raise InvalidRequestError(f"{place}.{name}: token id {min(ids)} is negative", place)
    if imitates:
        return TargetedTokens(datum.tokens, targets, tuple(map(float, values.get("weights", [1.0] * length))))
    advantages, logprobs = (tuple(map(float, values[name])) for name in ("advantages", "logprobs"))
    return TargetedTokens(datum.tokens, targets, advantages, logprobs)


def _one_dimension(tensor: Tensor, name: str, place: str, length: int) -> Sequence[float]:
    if len(tensor.values) != length or (tensor.shape is not None and tensor.shape != (length,)):
        shape = list(tensor.shape or (len(tensor.values),))
        raise InvalidRequestError(
            f"{place}: loss_fn_inputs.{name} has shape {shape}, and the sequence has {length} tokens: send one value "
            "for each token; several targets for one place are not supported",
            place,
        )
    return tensor.values
