"""A server of a model with recurrent layers: what it cannot do is off."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from harness import assert_same_tokens, solo
from tiny import save_tiny

from mlx_parallm.app.build import RunningEngine
from mlx_parallm.config import configure
from mlx_parallm.core.requests import GenerationRequest, RequestFinished, SamplingParams, SequenceOutput, StopParams

REPEATED = (5, 6, 7, 8) * 20
"""A prompt whose continuation is guessed where guessing is possible."""


def engine(folder: Path, **server: object) -> RunningEngine:
    keys = {f"server__{name}": value for name, value in server.items()}
    return RunningEngine(
        configure(folder / "model", rl_training__enabled=False, server__kv_cache_memory="16MB", **keys)
    )


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
async def test_rows_that_cannot_be_rolled_back_are_served_without_guesses(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny(family, tmp_path / "model")
    served = engine(tmp_path, speculation="auto")
    with caplog.at_level(logging.INFO, "mlx_parallm.engine.draft_loading"):
        served.start()
    try:
        request = GenerationRequest("x", (REPEATED,), SamplingParams(temperature=0.0), StopParams(8))
        events = [event async for event in served.processor.generate(request)]
    finally:
        served.stop()
    assert isinstance(events[-1], RequestFinished)
    tokens = [token for event in events if isinstance(event, SequenceOutput) for token in event.token_ids]
    assert_same_tokens(tokens, solo(model, REPEATED, 8), 1e-5)
    assert "model is served without speculation" in caplog.text
