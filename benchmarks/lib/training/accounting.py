"""What serving and training take of a machine's memory, from the same accounting as the server's.

    weights ─┬─ KV of rows ─┬─ bank of adapters ─┬─ policy: factors and AdamW, twice ─┬─ gradients ─┬─ micro-step

`measured` compares the largest part that is a guess, the micro-step, with what MLX holds.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.lib.training.releases import Built, Release
from mlx_parallm.kv.device_memory import default_budget
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.device import MachineMemory, memory_limits, prepare_device

from family_checks import CONFIGURATIONS, random_model, true_model  # isort: skip  the last import made them visible
from peaks import GROUPS, RANK, Trained  # isort: skip

SLOTS, ROWS = 4, 8
"""Slots that the bank holds for a few versions; rows that are served beside training."""

SAMPLE, SAMPLE_STEP = 1024, 512
"""Tokens of the longest sample that training is given room for, and the steps in which more is tried."""

STATES = 2
"""States of the policy in memory: the one in training, and one to go back to."""

MAC_SHARE = {16: 2 / 3, 32: 2 / 3, 64: 3 / 4}
"""Share of the memory, in GB, that Metal recommends as a working set."""

MAC_STALL_S = 0.1
"""The default of max_decode_stall_ms on a GPU."""

BUNDLED = "bundled 135M"
KINDS = (
    "llama", "gpt_oss", "gemma3n", "gemma4_text", "deepseek_v3", "qwen3_moe", "qwen3_5", "kimi_linear", "mamba2",
    "nemotron_h", "lfm2",
)  # fmt: skip
"""Tiny models of the tests that are measured."""

TRUE = ("Qwen3.5-4B", "Gemma 4 E4B", "gpt-oss-20b", "GLM-4.7-Flash")
"""Releases whose true widths are measured, with weights of 16 and 4 bits."""


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes on one machine.

    alone: rows that fit beside the weights, without training.
    adapter: of all linears of a layer, in a slot of the bank. row: of one row of `context` tokens. policy: in training,
    with its optimizer and gradients.
    micro_step: of `micro_batch_tokens` tokens in samples of at most SAMPLE.
    rows: how many rows fit beside all that, at most ROWS. longest: the longest sample that fits beside those rows; 0 if
        not even one row fits beside training.
    """

    base: str
    family: str
    machine_gb: int
    context: int
    weights: int
    adapter: int
    bank: int
    row: int
    alone: int
    policy: int
    micro_step: int
    micro_batch_tokens: int
    rows: int
    longest: int


def account(base: Built, machine_gb: int, context: int) -> Account:
    """What the base takes on a Mac of that size, if rows have `context` tokens."""
    gigabyte = 1 << 30
    machine = MachineMemory(machine_gb * gigabyte, int(MAC_SHARE[machine_gb] * machine_gb * gigabyte), can_wire=True)
    limits = memory_limits(machine)
    budget = default_budget(limits.memory, limits.cache, base.weight_bytes, None)
    factors = base.factors(RANK)
    adapter, policy = factors * base.kept.dtype.size, (3 * STATES + 1) * 4 * factors
    bank, footprint = SLOTS * adapter, base.footprint
    tokens = footprint.micro_batch_tokens(budget, MAC_STALL_S, cpu=False, checkpointed=True)
    row, free = base.row_bytes(context), budget - bank - policy

    def micro_step(sample: int) -> int:
        return footprint.micro_step_bytes(max(tokens, sample), sample, checkpointed=True)

    rows = max(0, min(ROWS, (free - micro_step(SAMPLE)) // row))
    longest = SAMPLE if rows else 0
    while rows and longest < context and rows * row + micro_step(longest + SAMPLE_STEP) <= free:
        longest += SAMPLE_STEP
    sizes = (base.weight_bytes, adapter, bank, row, budget // row, policy, micro_step(SAMPLE), tokens)
    return Account(base.name, base.family, machine_gb, context, *sizes, rows, longest)


def accounts(releases: Sequence[Release], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """What each of them takes on each machine. In this process."""
    built = (Built(release) for release in releases)
    return [asdict(account(each, size, context)) for each in built for context in contexts for size in MAC_SHARE]


def measured(name: str, bits: int | None = None) -> list[dict[str, Any]]:
    """Measured and expected peaks of micro-steps, in bytes, with the gradients: of the bundled model, of a tiny model
    of the tests, or, with weights of so many bits, of a release in its true widths. In this process."""
    prepare_device()
    if bits is None:
        model = load_bundled(True)[0] if name == BUNDLED else random_model(CONFIGURATIONS[name])
    else:
        model, name = true_model(name, bits), f"{name}, {bits} bits"
    made = []
    for peak in Trained(model).peaks(GROUPS if bits is None else GROUPS[:1]):
        made.append({"model": name, "tokens": peak.group.tokens, **asdict(peak)})
        print(f"  {name}, {peak.group.tokens} tokens: {peak.measured / 1e6:.0f} MB, expected {peak.expected / 1e6:.0f}")
    return made
