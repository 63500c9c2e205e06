"""The gated delta rule, and linear attention, over many tokens at a time, with a gradient, in plain MLX.

    S_t = S_{t-1} g_t + β_t (v_t - S_{t-1} g_t k_t) k_tᵀ          y_t = S_t q_t          S [Dv, Dk]

mlx-lm has a kernel for Metal, which has no gradient, and otherwise a loop over tokens, whose backward pass keeps a
state for each of them. Here a chunk of C tokens that begins with the state S is a few products, with
G_i = Σ_{j ≤ i} log g_j and D_ij = exp(G_i - G_j) (Yang et al., "Gated Delta Networks", arXiv 2412.06464, section 3.3):

    u = (I + A)⁻¹ β (v - e^G S k)       A_ij = β_i D_ij k_i·k_j, j < i
    y_i = e^{G_i} S q_i + Σ_{j ≤ i} D_ij (q_i·k_j) u_j
    S'  = e^{G_C} S + Σ_j D_Cj u_j k_jᵀ

Linear attention with a decay is the same with u = v. All but what contains S is computed for all chunks together.
Decays are at most 1: only differences of G are exponents, and only downwards. They are given as log g, whose gradient
is finite where g underflows.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

CHUNK = 64
"""Tokens of a chunk. With longer ones the products within a chunk cost more than those with its state."""

_SMALLEST_LOG_DECAY = -27.6
"""The logarithm of 1e-12. Smaller decays count as this one: their sums would have no digits left for the others."""

_DIRECT = 4
"""Tokens whose decays are multiplied number by number, if each number of a key has its own."""


def gates(
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """log g and β of `gated_delta`, from the arguments of mlx-lm's `gated_delta_update`.

    Args:
        lower_bound: log g is between it and 0 (Kimi K3).
        allow_neg_eigval: β is up to 2, and not up to 1.
    """
    rate = mx.exp(a_log.astype(mx.float32))
    if lower_bound is None:
        log_g = -rate * nn.softplus(a + dt_bias)
    else:
        log_g = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
    beta = mx.sigmoid(b)
    return log_g, 2.0 * beta if allow_neg_eigval else beta


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array | None, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """What the tokens read, [B, T, Hv, Dv] of the type of `v`, and the state after them, float32.

    Args:
        q, k: [B, T, Hk, Dk]. Hv / Hk heads of the values share one of these.
        v: [B, T, Hv, Dv].
        log_g: float32 [B, T, Hv], or [B, T, Hv, Dk] if each number of a key has its own decay (Kimi Delta Attention,
            arXiv 2510.26692); 0 or less.
        beta: [B, T, Hv]; None: linear attention, S_t = S_{t-1} g_t + v_t k_tᵀ.
        state: [B, Hv, Dv, Dk], before the first token; None: zeros.
    """
    batch, tokens, key_heads, _ = q.shape
    heads = (key_heads, v.shape[2] // key_heads)
    size = min(CHUNK, 1 << (tokens - 1).bit_length())
    chunks = -(-tokens // size)

    def cut(array: mx.array, heads: tuple[int, int]) -> mx.array:
        """[B, T, H, D] → float32 [B, Hk, Hv / Hk, chunks, C, D], or with one head in place of Hv / Hk."""
        padding = [(0, 0), (0, chunks * size - tokens), (0, 0), (0, 0)]
        array = mx.pad(array.astype(mx.float32), padding)
        return array.reshape(batch, chunks, size, *heads, array.shape[-1]).transpose(0, 3, 4, 1, 2, 5)

    q, k = cut(q, (key_heads, 1)), cut(k, (key_heads, 1))
    values = cut(v, heads)
    log_g = mx.maximum(log_g, _SMALLEST_LOG_DECAY)
    sums = mx.cumsum(cut(log_g if log_g.ndim == 4 else log_g[..., None], heads), axis=-2)
    products = _decayed_by_number if log_g.ndim == 4 else _decayed_by_token
    of_keys, of_queries = products([k, q], k, sums)
    since_start, last = mx.exp(sums), sums[..., -1:, :]
    new, old = values, since_start * k  # u = new - old Sᵀ
    if beta is not None:
        betas = cut(beta[..., None], heads)
        inverse = _inverse(betas * _below(of_keys))
        new, old = inverse @ (betas * new), inverse @ (betas * old)
    q, k, decays = since_start * q, mx.exp(last - sums) * k, mx.exp(last)
    shape = (batch, *heads, 1, v.shape[3], q.shape[-1])
    state = mx.zeros(shape) if state is None else state.astype(mx.float32).reshape(shape)
    of_chunks = (mx.split(each, chunks, axis=3) for each in (q, k, decays, new, old, of_queries))
    outputs = []
    for q, k, decay, new, old, of_queries in zip(*of_chunks, strict=True):
        turned = state.swapaxes(-1, -2)
        changes = new if beta is None else new - old @ turned
        outputs.append(q @ turned + of_queries @ changes)
        state = decay * state + changes.swapaxes(-1, -2) @ k
    read = mx.concatenate(outputs, axis=3).transpose(0, 3, 4, 1, 2, 5).reshape(batch, -1, *v.shape[2:])
    return read[:, :tokens].astype(v.dtype), state.reshape(batch, v.shape[2], *state.shape[-2:])


def _decayed_by_token(arrays: list[mx.array], k: mx.array, sums: mx.array) -> list[mx.array]:
    """For each of these arrays x [..., C, Dk], exp(G_i - G_j) x_i·k_j for j ≤ i, and 0 above: [..., C, C].
    `sums`: G, [..., C, 1]."""
    seen = mx.tri(sums.shape[-2]) > 0
    decays = mx.exp(mx.where(seen, sums - sums.swapaxes(-1, -2), -mx.inf))
    return [decays * (x @ k.swapaxes(-1, -2)) for x in arrays]


def _decayed_by_number(arrays: list[mx.array], k: mx.array, sums: mx.array) -> list[mx.array]:
    """The same with `sums` [..., C, Dk], by halves: a token of the second half and one of the first are each decayed
    from or to where the halves meet, so they are one product."""
    size = sums.shape[-2]
    if size <= _DIRECT:
        seen = mx.tri(size)[..., None] > 0
        decays = mx.exp(mx.where(seen, sums[..., :, None, :] - sums[..., None, :, :], -mx.inf))
        return [(decays * x[..., :, None, :] * k[..., None, :, :]).sum(-1) for x in arrays]

    def halves(array: mx.array) -> mx.array:
        return array.reshape(*array.shape[:-2], 2, size // 2, array.shape[-1])

    parts, keys, sums = [halves(x) for x in arrays], halves(k), halves(sums)
    first, second = sums[..., 0, :, :], sums[..., 1, :, :]
    middle = first[..., -1:, :]
    since, until = mx.exp(second - middle), mx.exp(middle - first)
    decayed = (until * keys[..., 0, :, :]).swapaxes(-1, -2)
    inner = _decayed_by_number(parts, keys, sums)
    return [
        _lower(each[..., 0, :, :], (since * x[..., 1, :, :]) @ decayed, each[..., 1, :, :])
        for x, each in zip(parts, inner, strict=True)
    ]


def _below(square: mx.array) -> mx.array:
    """What is below the diagonal."""
    return square * mx.tri(square.shape[-1], k=-1)


def _inverse(below: mx.array) -> mx.array:
    """(I + A)⁻¹ of A [..., C, C], which has numbers below its diagonal only; C a power of two.

    By halves, it is as exact as substitution. The product of I + A^(2^i) has fewer steps, but with like keys and β near
    1 its powers cancel, and no digit is left.
    """
    size = below.shape[-1]
    if size == 1:
        return mx.ones_like(below)
    half = size // 2
    first, second = _inverse(mx.stack([below[..., :half, :half], below[..., half:, half:]]))
    return _lower(first, -(second @ below[..., half:, :half] @ first), second)


def _lower(first: mx.array, corner: mx.array, second: mx.array) -> mx.array:
    """[[first, 0], [corner, second]]."""
    above = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([above, mx.concatenate([corner, second], axis=-1)], axis=-2)


def wkv7(
    r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """RWKV-7's rule (arXiv 2503.14456), token by token: S_t = S_{t-1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ, y_t = S_t r_t.

    Args:
        r, w, k, v, a, b: [B, T, H, D].
        state: [B, H, D, D], before the first token.

    Returns:
        [B, T, H, D], and the state after the last token.
    """
    outputs = []
    for r_, w_, k_, v_, a_, b_ in zip(*(_each(array) for array in (r, w, k, v, a, b)), strict=True):
        erased = (state @ mx.swapaxes(a_, -1, -2)) @ b_
        state = state * w_ + mx.swapaxes(v_, -1, -2) @ k_ + erased
        outputs.append((state @ mx.swapaxes(r_, -1, -2))[..., 0])
    return mx.stack(outputs, axis=1).astype(r.dtype), state


def _each(array: mx.array) -> list[mx.array]:
    """[B, T, H, D] as T times [B, H, 1, D]. The gradient of a split is one array, that of T indices T of them."""
    return list(mx.split(mx.swapaxes(array, 1, 2), array.shape[1], axis=2))
