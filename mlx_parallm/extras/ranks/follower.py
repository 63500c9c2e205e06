"""A rank other than 0: it repeats what rank 0 does, on its own part of the model, the KV pool and the adapter bank.
While there is nothing to do, it sleeps in `recv`."""

from __future__ import annotations

import socket
from base64 import b64decode

import mlx.core as mx
from safetensors.numpy import load

from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.adapters.weights import LoRAPair
from mlx_parallm.batch.runner import BatchRunner
from mlx_parallm.batch.spans import Span
from mlx_parallm.extras.ranks.operations import (
    ClearGroup,
    ClearPool,
    CopyBlocks,
    FitSlots,
    ForwardPass,
    Operation,
    ReadSlot,
    ResizeArena,
    RowTokens,
    Stop,
    TrainingPass,
    TrainingStage,
    WriteSlot,
)
from mlx_parallm.extras.ranks.training import FollowingTraining
from mlx_parallm.extras.ranks.wire import decode, receive
from mlx_parallm.kv.row import KVRow


class Follower:
    """Repeats operations. `bank`: the adapter bank of the runner's model. `training`: None if rank 0 does not train."""

    def __init__(self, runner: BatchRunner, bank: AdapterBank, training: FollowingTraining | None = None) -> None:
        self._runner = runner
        self._bank = bank
        self._training = training

    def follow(self, connection: socket.socket) -> None:
        """Repeats what comes until rank 0 stops.

        Raises:
            ConnectionError: the connection has ended before.
        """
        while not isinstance(operation := decode(receive(connection)), Stop):
            self.repeat(operation)

    def repeat(self, operation: Operation) -> None:
        """Does what rank 0 does at the same time."""
        match operation:
            case ForwardPass():
                self._run(operation)
            case ResizeArena(store, blocks, most_bytes):
                self._runner.cache.stores[store].arena.resize(blocks, most_bytes)
            case CopyBlocks(store, sources, targets):
                self._runner.cache.stores[store].arena.copy(sources, targets)
            case ClearPool():
                self._runner.clear()
            case FitSlots(group, slots, paths, rank):
                self._bank.groups[group].fit(slots, paths, rank)
            case WriteSlot():
                self._write(operation)
            case ReadSlot(group, slot, ranks):
                self._bank.groups[group].read(slot, ranks)
            case ClearGroup(group):
                self._bank.groups[group].clear()
            case TrainingPass():
                assert self._training is not None
                self._training.begin(operation)
            case TrainingStage(number):
                assert self._training is not None
                self._training.compute(number)

    def _run(self, operation: ForwardPass) -> None:
        self._runner.attention = operation.attention
        spans = [Span(_row(tokens), tokens.start, tokens.tokens) for tokens in operation.rows]
        outputs = self._runner.run_trunk(mx.array(operation.ids, mx.uint32), spans)
        mx.eval(outputs, self._runner.cache.arrays())
        self._runner.wait()

    def _write(self, operation: WriteSlot) -> None:
        factors, scales = load(b64decode(operation.factors)), operation.scales
        pairs = {path: LoRAPair(factors[f"{path}.a"], factors[f"{path}.b"], scale) for path, scale in scales.items()}
        self._bank.groups[operation.group].write(operation.slot, pairs)


def _row(tokens: RowTokens) -> KVRow:
    return KVRow(tables=tokens.tables, computed=tokens.start, adapter_slot=tokens.slot)
