"""Footprint: the memory and the time that a micro-step is expected to take, from the dimensions of the model.

A micro-step keeps, for each of its tokens, the output of every layer, or all activations of every layer if they are
not computed again. Beside that there are, one after the other, the logits of one block of positions, and the temporary
arrays of the layer that the backward pass is in. The longest unit that cannot be cut is that layer's.

Both are guesses before anything has run. They decide how samples are split, which must not depend on how fast or how
full the machine happens to be: a replayed update is split as it was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_parallm.adapters.weights import LinearSpec
from mlx_parallm.rl.learn.attention import SCORES_AT_ONCE
from mlx_parallm.rl.learn.head import HEAD_BLOCK
from mlx_parallm.rl.learn.packed_pass import SEGMENT

SMALLEST, LARGEST = 256, 8192
"""Bounds of the tokens of a micro-step. Above some thousand tokens a larger one is no faster."""

_MEMORY_SHARE = 0.25
"""Largest part of the memory for requests and training that a micro-step may be expected to take."""

_STALL_SHARE = 0.5
"""Part of the longest decode stall that the backward pass of one layer is expected to take at most."""

_CPU_RATE, _GPU_RATE = 1e11, 4e12
"""FLOP/s that a modest CPU and a modest GPU reach in training."""

_NUMBER = 4
"""Bytes of an activation: the products of LoRA factors are computed in float32."""

# Copies of an array that are in memory at the same time, fitted to the peaks of micro-steps of 256 to 2,048 tokens of
# the bundled model on a CPU.
_FEATURES_KEPT, _SCORES_KEPT = 1.7, 1.8
_FEATURES, _SCORES = 2.5, 6.5
_LOGITS = 3.5
_LOGITS_OF_HEAD_ADAPTER = 1.0
_STATES = 4.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What decides about memory and time of a micro-step.

    layers: number of layers. hidden: width of the hidden states. heads: query heads. vocabulary: width of the logits.
    features: of one layer's linears, the inputs and outputs together. parameters: of these linears. Of experts, as many
        count as a token uses.
    head_rank: rank of the head's trained adapter; 0 if the head is not trained.
    state: numbers of the largest recurrent layer's state; 0 if there is none. There is one after each token of the
        segment that the backward pass is in, where a rule is a loop, and less where it is computed in chunks.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    features: int
    parameters: int
    head_rank: int = 0
    state: int = 0

    @classmethod
    def of(
        cls,
        layers: int,
        linears: Iterable[LinearSpec],
        heads: int,
        vocabulary: int,
        head_rank: int = 0,
        state: int = 0,
    ) -> Footprint:
        """`linears`: those of all layers."""
        shapes = [(each.in_features, each.out_features) for each in linears for _ in range(each.chosen)]
        ((hidden, _),) = Counter(inputs for inputs, _ in shapes).most_common(1)
        features = sum(inputs + outputs for inputs, outputs in shapes) // layers
        parameters = sum(inputs * outputs for inputs, outputs in shapes) // layers
        return cls(layers, hidden, heads, vocabulary, features, parameters, head_rank, state)

    def micro_step_bytes(self, tokens: int, context: int, checkpointed: bool) -> int:
        """Expected peak memory of a micro-step, without the gradients. `context`: tokens of the longest row.
        `checkpointed`: whether layers are computed again in the backward pass.

        A trained head has a gradient for each block of positions; they are added up at the end.
        """
        scores, states = self.heads * min(tokens * context, SCORES_AT_ONCE), _STATES * min(tokens, SEGMENT) * self.state
        all_kept = _FEATURES_KEPT * tokens * self.features + _SCORES_KEPT * scores + states
        kept = tokens * self.hidden if checkpointed else all_kept
        layer = _FEATURES * tokens * self.features + _SCORES * scores + states
        copies = _LOGITS + (_LOGITS_OF_HEAD_ADAPTER if self.head_rank else 0.0)
        logits = copies * min(tokens, HEAD_BLOCK) * self.vocabulary
        head = math.ceil(tokens / HEAD_BLOCK) * self.head_rank * (self.hidden + self.vocabulary)
        return int(_NUMBER * (self.layers * kept + max(layer, logits) + head))

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
