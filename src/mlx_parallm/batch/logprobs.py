"""Logprobs of the raw model, before penalties, bias, temperature and filters: OpenAI's meaning of `logprobs`."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.batch.rowwise import exp, in_blocks, row_sum

TOP_LOGPROBS = 20
"""How many alternatives are computed for a row that asks for any, so that ties break alike whatever neighbours ask."""


def log_normaliser(logits: mx.array) -> mx.array:
    """logsumexp of each row: fp32 [N, V] → fp32 [N, 1]."""
    peak = logits.max(-1, keepdims=True)
    return peak + mx.log(row_sum(exp(logits - peak)))


def token_logprobs(logits: mx.array, tokens: mx.array, normaliser: mx.array) -> mx.array:
    """Logprob of one token per row: fp32 [N, V], int [N], fp32 [N, 1] → fp32 [N], nats."""
    return (mx.take_along_axis(logits, tokens[:, None], -1) - normaliser).squeeze(-1)


def token_ranks(logits: mx.array, tokens: mx.array) -> mx.array:
    """Place of one token per row among all tokens, 1 for the most likely: fp32 [N, V], int [N] → int32 [N].

    It is one more than the number of tokens of a greater logit, so that tokens that tie have the same rank.
    """
    own = mx.take_along_axis(logits, tokens[:, None], -1)
    return (logits > own).sum(-1) + 1


def top_logprobs(logits: mx.array, normaliser: mx.array) -> tuple[mx.array, mx.array]:
    """The best tokens of each row, best first, equal ones by id.

    Args:
        logits: fp32 [N, V].
        normaliser: fp32 [N, 1], of `log_normaliser`.

    Returns:
        ids int32 and logprobs fp32, both [N, K], K = min(TOP_LOGPROBS, V). Of tokens that tie for the
        last place any may be returned, always the same ones for the same row.
    """
    ids = mx.sort(_top_ids(logits, min(TOP_LOGPROBS, logits.shape[-1])), -1)
    values = mx.take_along_axis(logits, ids, -1)
    order = mx.argsort(-values, -1)  # stable: equal values stay in order of id
    best = mx.take_along_axis(values, order, -1)
    return mx.take_along_axis(ids, order, -1), best - normaliser


def _top_ids(logits: mx.array, k: int) -> mx.array:
    """int32 [N, k], unordered: the k largest lie in the k blocks of largest maximum."""
    blocks = in_blocks(logits, -mx.inf)
    rows, count, size = blocks.shape
    if count <= k:
        return mx.argpartition(logits, -k, -1)[:, -k:].astype(mx.int32)
    block = mx.argpartition(blocks.max(-1), -k, -1)[:, -k:].astype(mx.int32)
    ids = (block[:, :, None] * size + mx.arange(size, dtype=mx.int32)).reshape(rows, -1)
    inside = mx.take_along_axis(blocks, block[:, :, None], 1).reshape(rows, -1)
    return mx.take_along_axis(ids, mx.argpartition(inside, -k, -1)[:, -k:], -1)
