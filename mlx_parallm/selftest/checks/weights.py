"""Quantized weights as the device serves them: quantized on a GPU, as float32 on a CPU."""

from __future__ import annotations

import numpy as np

from mlx_parallm.selftest.check import Check, Outcome
from mlx_parallm.selftest.plain import PlainModel
from mlx_parallm.selftest.tested import TestedModel

_PROMPT = 16


async def _stored(tested: TestedModel) -> Outcome:
    prompt = tested.prompt(_PROMPT, seed=90)
    answer = await tested.ask(prompt, 1, scored=True)
    rows = await tested.on_device(lambda: PlainModel(tested.path, stored=True).logprobs(prompt))
    expected = rows[np.arange(_PROMPT - 1), prompt[1:]]
    scored = [float("nan") if entry is None else entry.logprob for entry in answer.prompt[1:]]
    return Outcome.of([float(np.abs(expected - scored).max())], tested.rounding.of_logprobs)


CHECK = Check(
    name="quantized weights",
    compared="logprobs of a prompt, with a plain pass over the weights as they are stored, quantized",
    advice="The weights are read wrongly. Serve an unquantized copy of the model, and attach the report to an issue.",
    run=_stored,
    applies=lambda tested: tested.served.card.quantization != "none",
)
