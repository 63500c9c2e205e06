"""What serving and training take of a machine's memory, from the same accounting as the server's.

    weights ─┬─ KV of rows ─┬─ bank of adapters ─┬─ policy: factors and AdamW, twice ─┬─ gradients ─┬─ micro-step

`measured` compares the largest part that is a guess, the micro-step, with what MLX holds.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip

from mlx_parallm.adapters.weights import LinearSpec
from mlx_parallm.app.training import footprint_of
from mlx_parallm.config import ModelConfig, RLTrainingConfig
from mlx_parallm.core import DeviceSchedule, default_budget
from mlx_parallm.model.device import MachineMemory, memory_limits
from mlx_parallm.model.layer_state import KVLayout, LayerSpec
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.rl.learn.footprint import Footprint
from mlx_parallm.rl.learn.model import TrainableModel
from mlx_parallm.rl.learn.policy import Policy
from mlx_parallm.rl.learn.trainer import GRPOTrainer
from mlx_parallm.rl.objectives.batches import UpdateBatch
from mlx_parallm.rl.objectives.samples import Sample, answered

RANK, SLOTS, ROWS = 16, 4, 8
"""Rank of all adapters; slots that the bank holds for a few versions; rows that are served beside training."""

SAMPLE, SAMPLE_STEP = 1024, 512
"""Tokens of the longest sample that training is given room for, and the steps in which more is tried."""

STATES = 2
"""States of the policy in memory: the one in training, and one to go back to."""

MAC_SHARE = {16: 2 / 3, 32: 2 / 3, 64: 3 / 4}
"""Share of the memory, in GB, that Metal recommends as a working set."""

MAC_STALL_S = 0.1
"""The default of max_decode_stall_ms on a GPU."""

SHAPES = ((8, 56, 25), (8, 128, 48), (16, 64, 60), (1, 512, 512))
"""Micro-steps that are measured: rows, tokens of their prompt, tokens of each answer."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model. `parameters`: all of its weights. `bits` of a weight, with the scales of its group."""

    name: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: float
    bits: float
    dtype: mx.Dtype

    @property
    def weight_bytes(self) -> int:
        return int(self.parameters * self.bits / 8)

    @property
    def linears(self) -> list[LinearSpec]:
        """Those that an adapter changes, of all layers."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            **{"q_proj": (self.hidden, queries), "k_proj": (self.hidden, keys), "v_proj": (self.hidden, keys)},
            **{"o_proj": (queries, self.hidden), "gate_proj": (self.hidden, self.mlp)},
            **{"up_proj": (self.hidden, self.mlp), "down_proj": (self.mlp, self.hidden)},
        }
        return [LinearSpec(f"{at}.{name}", *shape, name) for at in range(self.layers) for name, shape in shapes.items()]

    @property
    def kv_bytes_per_token(self) -> int:
        spec = LayerSpec(self.kv_heads, self.head_dim, self.head_dim)
        return KVLayout((spec,) * self.layers, self.dtype).bytes_per_token


BASES = (
    Base("bundled 135M, float32", 30, 576, 1536, 9, 3, 64, 49152, 134.5e6, 32, mx.float32),
    Base("Llama 3.2 1B, 4-bit", 16, 2048, 8192, 32, 8, 64, 128256, 1.236e9, 4.5, mx.bfloat16),
    Base("Llama 3.2 3B, 4-bit", 28, 3072, 8192, 24, 8, 128, 128256, 3.213e9, 4.5, mx.bfloat16),
    Base("Llama 3.1 8B, 4-bit", 32, 4096, 14336, 32, 8, 128, 128256, 8.030e9, 4.5, mx.bfloat16),
    Base("Qwen3 8B, 4-bit", 36, 4096, 12288, 32, 8, 128, 151936, 8.191e9, 4.5, mx.bfloat16),
)


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes on one machine.

    adapter: of all linears of a layer, in a slot of the bank. row: of one row of `context` tokens. policy: in training,
    with its optimizer and gradients.
    micro_step: of `micro_batch_tokens` tokens in samples of at most SAMPLE.
    rows: how many rows fit beside all that, at most ROWS. longest: the longest sample that fits beside those rows; 0 if
        not even one row fits beside training.
    """

    base: str
    machine_gb: int
    context: int
    weights: int
    adapter: int
    bank: int
    row: int
    policy: int
    micro_step: int
    micro_batch_tokens: int
    rows: int
    longest: int


def account(base: Base, machine_gb: int, context: int) -> Account:
    """What the base takes on a Mac of that size, if rows have `context` tokens."""
    gigabyte = 1 << 30
    machine = MachineMemory(machine_gb * gigabyte, int(MAC_SHARE[machine_gb] * machine_gb * gigabyte), can_wire=True)
    limits = memory_limits(machine)
    budget = default_budget(limits.memory, limits.cache, base.weight_bytes, None)
    factors = RANK * sum(each.in_features + each.out_features for each in base.linears)
    adapter, policy = factors * base.dtype.size, (3 * STATES + 1) * 4 * factors
    bank = SLOTS * adapter
    footprint = Footprint.of(base.layers, base.linears, base.heads, base.vocabulary)
    tokens = footprint.micro_batch_tokens(budget, MAC_STALL_S, cpu=False, checkpointed=True)
    row, free = context * base.kv_bytes_per_token, budget - bank - policy

    def micro_step(sample: int) -> int:
        return footprint.micro_step_bytes(max(tokens, sample), sample, checkpointed=True)

    rows = max(0, min(ROWS, (free - micro_step(SAMPLE)) // row))
    longest = SAMPLE if rows else 0
    while rows and longest < context and rows * row + micro_step(longest + SAMPLE_STEP) <= free:
        longest += SAMPLE_STEP
    sizes = (base.weight_bytes, adapter, bank, row, policy, micro_step(SAMPLE), tokens)
    return Account(base.name, machine_gb, context, *sizes, rows, longest)


def measured() -> list[Mapping[str, float]]:
    """Tokens, longest row, measured and expected peak of micro-steps of the bundled model, in bytes, without gradients.
    In this process."""
    manager = SharedModelManager(progress=False)
    bank = manager.install_bank(SLOTS, RANK)
    footprint = footprint_of(manager.model, manager.plan, bank.layout)
    made: list[Mapping[str, float]] = []
    for checkpointed in (True, False):
        model = TrainableModel(manager.model, bank, manager.plan, lambda *_, always=checkpointed: always)
        for shape in SHAPES if checkpointed else SHAPES[:2]:
            tokens, context = shape[1] + shape[0] * shape[2], shape[1] + shape[2]
            peak = _peak(model, _samples(*shape))
            expected = footprint.micro_step_bytes(tokens, context, checkpointed)
            made.append(
                {"checkpointed": checkpointed, "tokens": tokens, "context": context, "peak": peak, "expected": expected}
            )
            print(f"  {tokens} tokens: {peak / 1e6:.0f} MB, expected {expected / 1e6:.0f}", flush=True)
    return made


def _peak(model: TrainableModel, samples: Sequence[Sample]) -> int:
    """Peak memory of an update in one micro-step, without its gradients."""
    training = RLTrainingConfig(micro_batch_tokens=1 << 20).resolved(float32=True)
    trainer = GRPOTrainer(model, training, ModelConfig(), measure_kl=False)
    trainer.pace(DeviceSchedule().max_decode_stall_s)
    policy = Policy(model.layout, ModelConfig())
    outcome = trainer.begin(policy, UpdateBatch(tuple(samples)))
    while trainer.waits():
        trainer.advance()
    outcome.result(timeout=0)
    return max(trainer._job_bytes) - 4 * policy.parameters


def _samples(rows: int, prompt: int, answer: int) -> list[Sample]:
    """A group of random tokens, whose prompt is computed once."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(count)]

    shared = ids(prompt)
    return [answered(shared, ids(answer), advantage=1.0 - 2.0 * (row % 2)) for row in range(rows)]
