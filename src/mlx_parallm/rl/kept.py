"""KeptPolicy: a policy as it was at one moment, by reference to its arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair
from mlx_parallm.rl.snapshot import PolicySnapshot
from mlx_parallm.rl.trainable import Params


@dataclass(frozen=True, eq=False)
class KeptPolicy:
    """What `Policy.restore` goes back to. No update writes to these arrays; each makes new ones.

    So it costs no memory until the policy's next update, and `nbytes` from then on. Its arrays are evaluated and are
    read on the device thread only.
    """

    params: Params
    optimizer: dict[str, Any]
    scale: float
    step: int
    nbytes: int

    def copied(self, nbytes: int) -> Iterator[PolicySnapshot | None]:
        """Copies it to the host, about `nbytes` in each turn; yields None until the last turn yields the copy."""
        copies: dict[int, NDArray[np.generic]] = {}
        size = 0
        for leaf in self._leaves():
            copies[id(leaf)] = np.array(leaf)
            size += leaf.nbytes
            if size >= nbytes:
                size = 0
                yield None
        pairs = {
            path: LoRAPair(copies[id(pair["a"])], copies[id(pair["b"])], self.scale)
            for path, pair in self.params.items()
        }
        state = {name: copies[id(leaf)] for name, leaf in tree_flatten(self.optimizer)}
        yield PolicySnapshot(AdapterWeights(pairs), state, self.step)

    def _leaves(self) -> list[mx.array]:
        return [leaf for _, leaf in tree_flatten([self.params, self.optimizer])]
