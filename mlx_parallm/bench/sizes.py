"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = (1, 4, 8, 16)
"""Rows of the batches whose decode steps are measured."""
MIXED_ROWS = (1, 16, 64)
"""Rows of batches of eight adapters, beside as many of one adapter."""
CLIENTS = 8
"""Rows that decode while the engine trains."""
ADAPTERS = 8
RANK, SCALE = 16, 2.0
"""Of the adapters, which change all linears of a layer except experts and routers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured on one kind of device.

    Attributes:
        rounds: measurements of each figure on each side, after one that does not count.
        seconds: most seconds of decode steps of one measurement.
        context: tokens of the prompt of each row that decodes.
        steps: most decode steps of one measurement.
        prompts: tokens of the prompts whose prefill is measured.
        groups, group: groups of an update, and samples of each group.
        question, answer: tokens of a sample's prompt, which its group shares, and of its answer.
        only_tiny: the self-test leaves out the model that is measured.
    """

    rounds: int
    seconds: float
    context: int
    steps: int
    prompts: tuple[int, ...]
    groups: int
    group: int
    question: int
    answer: int
    only_tiny: bool = False


SIZES = {
    "gpu": Sizes(5, 2.0, 64, 128, (512, 2048), groups=1, group=4, question=64, answer=256),
    "cpu": Sizes(3, 1.0, 8, 32, (128, 512), groups=1, group=4, question=48, answer=24),
    "tiny": Sizes(1, 0.5, 8, 12, (64, 128), groups=1, group=2, question=12, answer=6, only_tiny=True),
}
