"""The results of long operations, in JSON and in Tinker's protobuf.

Source: the modules `tinker.types` and `tinker.proto.response_conv` of the PyPI package `tinker`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_parallm.core.requests import FinishReason
from mlx_parallm.errors import RequestError
from mlx_parallm.extras.tinker import protobuf
from mlx_parallm.extras.tinker.records import TokenScores
from mlx_parallm.server.errors import error_body

_LEAST = -1e30
"""In place of an infinitely small logprob, which JSON cannot write."""

TopLogprobs = Sequence[tuple[int, float]]
"""Token ids and logprobs of the most likely tokens at one place, best first."""

log = logging.getLogger(__name__)


class TinkerAnswer(Protocol):
    """The result of an operation."""

    @property
    def size(self) -> int:
        """About how many numbers it has."""

    def json(self) -> bytes: ...

    def protobuf(self) -> bytes | None:
        """None: clients expect this result as JSON."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A small result."""

    fields: Mapping[str, Any]

    @property
    def size(self) -> int:
        return len(self.fields)

    def json(self) -> bytes:
        return json.dumps(self.fields, allow_nan=False).encode()

    def protobuf(self) -> None:
        return None


def failure(error: Exception) -> Fields:
    """The result of an operation that failed. `category` tells the client whose mistake it was."""
    category = "user" if isinstance(error, RequestError) else "server"
    return Fields({"error": error_body(error).error.message, "category": category})


@dataclass(frozen=True, slots=True)
class LossAnswer:
    """The result of `forward` and `forward_backward`."""

    scores: TokenScores

    @property
    def size(self) -> int:
        return sum(map(len, self.scores.logprobs))

    @property
    def metrics(self) -> dict[str, float]:
        """The SDK adds up those of several requests, as the part behind the colon says."""
        return {"loss:sum": self.scores.loss}

    def json(self) -> bytes:
        outputs = [
            {"logprobs": {"data": _finite(values), "dtype": "float32", "shape": [len(values)]}}
            for values in self.scores.logprobs
        ]
        fields = {"loss_fn_output_type": "TorchLossReturn", "loss_fn_outputs": outputs, "metrics": self.metrics}
        return json.dumps(fields, allow_nan=False).encode()

    def protobuf(self) -> bytes | None:
        return protobuf.loss_output(self.scores.logprobs, self.metrics)


@dataclass(frozen=True, slots=True)
class TinkerSequence:
    """One sampled sequence. `tokens` have the token that ended it. `logprobs`: in nats, of the model itself."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ended: FinishReason
    top: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """The result of `asample`. `prompt_logprobs`, `prompt_top`: one entry for each token of the prompt, None for the
    first one; None if they were not asked for. `cached_tokens`: those of the prompt that were not computed again."""

    sequences: tuple[TinkerSequence, ...]
    prompt_logprobs: tuple[float | None, ...] | None
    prompt_top: tuple[TopLogprobs | None, ...] | None
    cached_tokens: int

    @property
    def size(self) -> int:
        return sum(len(each.tokens) * (1 + len(each.top[0]) if each.top else 1) for each in self.sequences) + len(
            self.prompt_logprobs or self.prompt_top or ()
        )

    def json(self) -> bytes:
        fields: dict[str, Any] = {
            "type": "sample",
            "sequences": [
                {"stop_reason": each.ended.value, "tokens": each.tokens, "logprobs": _finite(each.logprobs)}
                for each in self.sequences
            ],
            "prompt_cache_hit_tokens": self.cached_tokens,
        }
        if self.prompt_logprobs is not None:
            logprobs = self.prompt_logprobs
            fields["prompt_logprobs"] = [None if value is None else max(value, _LEAST) for value in logprobs]
        if self.prompt_top is not None:
            fields["topk_prompt_logprobs"] = [
                None if best is None else [(token, max(value, _LEAST)) for token, value in best]
                for best in self.prompt_top
            ]
        return json.dumps(fields, allow_nan=False).encode()

    def protobuf(self) -> bytes | None:
        sequences = [
            protobuf.Drawn(each.tokens, each.logprobs, each.ended is FinishReason.STOP, each.top)
            for each in self.sequences
        ]
        return protobuf.sample_response(sequences, self.prompt_logprobs, self.prompt_top, self.cached_tokens)


def _finite(values: Sequence[float]) -> list[float]:
    return [max(value, _LEAST) for value in values]
