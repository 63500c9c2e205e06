"""Footprint: the memory and the time that a micro-step is expected to take.

A micro-step keeps, for each of its tokens, the output of every layer, or all activations of every layer if they are
not computed again. Beside that there are, one after the other, the logits of one block of positions, and the temporary
arrays of the layer that the backward pass is in. The longest unit that cannot be cut is that layer's.

What layers take is found from the graphs of their backward passes, which are built for a few sizes and never run (see
`unit_memory`). Both memory and time are known before anything has run. They decide how samples are split, which must
not depend on how fast or how full the machine happens to be: a replayed update is split as it was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from itertools import accumulate

import mlx.core as mx

from mlx_parallm.adapters.weights import AdapterLayout
from mlx_parallm.batch.distributions import BLOCK
from mlx_parallm.train.branches import Branch, Bucket
from mlx_parallm.train.context import LoraSpan
from mlx_parallm.train.forwards import HEAD_BLOCK
from mlx_parallm.train.model import TrainableModel
from mlx_parallm.train.packed_pass import SEGMENT
from mlx_parallm.train.recomputation import Unit
from mlx_parallm.train.unit_memory import Found, unit_memory

SMALLEST, LARGEST = 256, 8192
"""Bounds of the tokens of a micro-step. Above some thousand tokens a larger one is no faster."""

_MEMORY_SHARE = 0.25
"""Largest part of the memory for requests and training that a micro-step may be expected to take."""

_STALL_SHARE = 0.5
"""Part of the longest decode stall that the backward pass of one layer is expected to take at most."""

_CPU_RATE, _GPU_RATE = 1e11, 4e12
"""FLOP/s that a modest CPU and a modest GPU reach in training."""

_MARGIN = 1.1
"""What is added to the memory that a graph shows: MLX copies some arrays to change the order of their numbers."""

_RANK = 16
"""Rank of the factors in the graphs. It hardly changes the memory."""

_LEAST, _MOST = 64, 2048
"""Tokens of the shortest row and of the largest graph that is built. Beyond, memory grows as it does up to there."""

_PADDING = 8
"""Part of a row that is counted as padding: mixers compute whole chunks, and the rows of the graphs have no other."""

_COPIES_ESTIMATED = 4.0
"""Copies of all inputs and outputs of a layer's linears that it takes if there is no graph of it."""

# Copies of an array of logits, in float32, that are in memory at the same time.
_LOGITS = 3.7
_LOGITS_PADDED = 2.5  # if the vocabulary has to be padded to whole blocks
_LOGITS_OF_HEAD_ADAPTER = 1.0
_NUMBER = 4


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrunkMemory:
    """Bytes that a model takes in a micro-step, without its head.

    outputs: what is kept between the passes if layers are computed again. backward: the most beside that.
    kept: what is kept beside the outputs if no layer is computed again. layer: the most beside all that; it is negative
        if the layers that take most come first, as the last ones have been freed before.
    """

    outputs: float
    backward: float
    kept: float
    layer: float

    def towards(self, other: TrunkMemory, share: float) -> TrunkMemory:
        """The point at this share of the way to another one. It is never less than this one: mixers pad short rows."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return TrunkMemory(*(one + share * max(0.0, two - one) for one, two in pairs))


TrunkMemories = Callable[[int, int], TrunkMemory]
"""(tokens, tokens of the longest row) → what a model takes."""


def trunk_memories(model: TrainableModel) -> TrunkMemories:
    """What a model takes of which all linears are trained. Graphs are built where both numbers are powers of two, when
    they are first asked for; between them the memory is interpolated."""
    found: Found = {}

    @cache
    def graph(tokens: int, context: int) -> TrunkMemory:
        try:
            return _trunk_memory(model, tokens, context, found)
        except ValueError as error:  # the graph depends on values, or MLX cannot export it
            _log.info("the memory of training is estimated from the sizes of the linears: %s", error)
            return _estimate(model.layout, tokens)

    def rows_of(tokens: int, context: int) -> TrunkMemory:
        padded = context + context // _PADDING
        return _between(max(min(padded, tokens), _LEAST), lambda context: graph(tokens, context))

    return lambda tokens, context: _between(max(tokens, 2 * _LEAST), lambda tokens: rows_of(tokens, context))


def _between(number: int, at: Callable[[int], TrunkMemory]) -> TrunkMemory:
    """What `at` gives for a number, of what it gives for the powers of two around it."""
    low = min(1 << (number.bit_length() - 1), _MOST // 2 if number > _MOST else _MOST)
    return at(low) if low == number else at(low).towards(at(2 * low), number / low - 1)


def _trunk_memory(model: TrainableModel, tokens: int, context: int, found: Found) -> TrunkMemory:
    """What a model takes if there is one row, or all rows begin with the same half. `found`: see `unit_memory`."""
    half = context // 2
    group = Branch(0, half, (Bucket(tokens // half - 1, half, 0),))
    branch = Branch(0, tokens, ()) if context == tokens else group
    factors = {
        path: {"a": mx.zeros(spec.a_shape(_RANK)), "b": mx.zeros(spec.b_shape(_RANK))}
        for path, spec in model.layout.linears.items()
    }

    def hidden(*leaves: mx.array) -> list[mx.array]:
        rest = iter(leaves)
        params = {path: {name: next(rest) for name in pair} for path, pair in factors.items()}
        spans = [LoraSpan(tokens, params, 1.0)]
        return [model.trunk(mx.zeros(tokens, mx.int32), [branch], spans, learns=True).hidden]

    unit = Unit(hidden, [leaf for pair in factors.values() for leaf in pair.values()])
    trunk = unit_memory(unit, found, (tokens, context))
    kept = list(accumulate(each.kept - each.outputs for each in trunk.inner))
    most = [before + each.after for before, each in zip(kept, trunk.inner, strict=True)]
    if not kept:  # no layer is computed again
        return TrunkMemory(trunk.kept, trunk.after, 0, trunk.after)
    return TrunkMemory(trunk.kept, trunk.after, kept[-1], max(most) - kept[-1])


def _estimate(layout: AdapterLayout, tokens: int) -> TrunkMemory:
    """The same without a graph, from the inputs and outputs of all linears."""
    specs = layout.linears.values()
    features = _NUMBER * tokens * sum((each.in_features + each.out_features) * each.chosen for each in specs)
    hidden = _NUMBER * tokens * layout.layers * layout.hidden
    layer = _COPIES_ESTIMATED * features / layout.layers
    return TrunkMemory(hidden, layer, _COPIES_ESTIMATED * features, layer)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What decides about memory and time of a micro-step.

    trunk: what the model takes without its head.
    parameters: of the linears of one layer; of experts, as many count as a token uses.
    hidden: width of the hidden states. vocabulary: width of the logits.
    head_rank: rank of the head's trained adapter; 0 if the head is not trained. segment: see `TrainableModel`.
    """

    trunk: TrunkMemories
    parameters: int
    hidden: int
    vocabulary: int
    head_rank: int = 0
    segment: int = SEGMENT

    @classmethod
    def of(cls, model: TrainableModel, vocabulary: int, head_rank: int = 0) -> Footprint:
        """`model`: one whose layers are computed again."""
        layout = model.layout
        parameters = sum(each.in_features * each.out_features * each.chosen for each in layout.linears.values())
        trunk, a_layer = trunk_memories(model), parameters // layout.layers
        return cls(trunk, a_layer, layout.hidden, vocabulary, head_rank, model.segment)

    def micro_step_bytes(self, tokens: int, context: int, checkpointed: bool) -> int:
        """Expected peak memory of a micro-step, without the gradients. `context`: tokens of the longest row.
        `checkpointed`: whether layers are computed again in the backward pass.

        A trained head has a gradient for each block of positions; they are added up at the end.
        """
        trunk = self.trunk(tokens, context)
        padded = _LOGITS_PADDED if self.vocabulary % BLOCK else 0.0
        copies = _LOGITS + padded + (_LOGITS_OF_HEAD_ADAPTER if self.head_rank else 0.0)
        logits = _NUMBER * copies * min(tokens, HEAD_BLOCK) * self.vocabulary
        head = _NUMBER * math.ceil(tokens / HEAD_BLOCK) * self.head_rank * (self.hidden + self.vocabulary)
        kept, most = (0.0, trunk.backward) if checkpointed else (trunk.kept, trunk.layer)
        return int(_MARGIN * (trunk.outputs + kept) + max(_MARGIN * most, logits) + head)

    def layer_seconds(self, tokens: int, cpu: bool) -> float:
        """Expected time of the backward pass of one layer, in which its forward pass is repeated."""
        return 6 * self.parameters * tokens / (_CPU_RATE if cpu else _GPU_RATE)

    def fits(self, tokens: int, context: int, checkpointed: bool, memory: int) -> bool:
        """Whether a micro-step is expected to keep to its share of `memory`, in bytes."""
        return self.micro_step_bytes(tokens, context, checkpointed) <= _MEMORY_SHARE * memory

    def micro_batch_tokens(self, memory: int, stall_s: float, cpu: bool, checkpointed: bool) -> int:
        """How large micro-steps should be: the largest power of two for which both keep to their bounds.

        Args:
            memory: bytes that requests and training share.
            stall_s: the longest that a decode step should wait.
        """
        tokens = LARGEST
        while tokens > SMALLEST and not (
            self.fits(tokens, tokens, checkpointed, memory)
            and self.layer_seconds(tokens, cpu) <= _STALL_SHARE * stall_s
        ):
            tokens //= 2
        return tokens
