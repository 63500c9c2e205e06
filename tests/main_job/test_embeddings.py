"""Embeddings of the real model, in a process: the openai client against a plain forward."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from main_job.serving import SERVED, Server, start, stop

from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.split import trunk_of

pytestmark = pytest.mark.slow

TEXTS = ["A cat sleeps on the mat.", "The kitten naps.", "Interest rates rose in March, and then again in June."]
BUNDLED = 1e-4
"""Invariant 8's bound across shapes, for the bundled model."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start("--debug")
    yield running
    stop(running)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_openai_client_gets_what_mlx_lms_model_computes(server: Server, pooling: str) -> None:
    manager = SharedModelManager(None, progress=False)
    create = server.client().embeddings.create
    by_default = create(model=SERVED, input=TEXTS, extra_body={"pooling": pooling})
    floats = create(model=SERVED, input=TEXTS, encoding_format="float", extra_body={"pooling": pooling})
    encoded = create(model=SERVED, input=TEXTS, encoding_format="base64", extra_body={"pooling": pooling})
    for text, *items in zip(TEXTS, by_default.data, floats.data, encoded.data, strict=True):
        hidden = np.array(trunk_of(manager.model)(mx.array([manager.tokenizer.encode(text)]))[0].astype(mx.float32))
        expected = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
        expected = expected / np.linalg.norm(expected)
        plain, numbers, packed = (item.embedding for item in items)
        for got in (plain, numbers, np.frombuffer(base64.b64decode(packed), "<f4")):
            assert np.abs(np.array(got) - expected).max() < BUNDLED
