"""Tinker's protobuf messages. SDKs from 0.25.0 on send `forward_backward` in them and read its result from them.

The generated module is part of the PyPI package `tinker`, which is an extra. It is imported when it is first needed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.extras.tinker.losses import LossInput, Tensor, TinkerDatum
from mlx_parallm.optional_packages import TINKER
from mlx_parallm.server.errors import BodyTooLargeError, MediaTypeError

MEDIA_TYPE = "application/x-protobuf"
_MASKED = -99999.0
"""The logprob that Tinker writes where there is none; the token id is 0."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled sequence. `stopped`: it ended by itself, and not at the limit. `top`: the most likely tokens at each
    place, and their logprobs."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class LossRequest:
    """A `ForwardBackwardRequest`. `forward_only`: no gradients are wanted. `message`: its arrays are not read yet."""

    model_id: str
    seq_id: int
    forward_only: bool
    message: Any

    def input(self) -> LossInput:
        """The sequences and the loss.

        Raises:
            InvalidRequestError: something in it is not supported or malformed.
        """
        config: dict[str, float | str] = dict(self.message.loss_fn_config)
        for name, value in self.message.loss_fn_config_v2.items():
            config[name] = value.text if value.WhichOneof("value") == "text" else value.number
        return LossInput([_datum(each) for each in self.message.data], self.message.loss_fn, config)


@cache
def _messages() -> Any:
    """The generated module. Raises MediaTypeError if the package is not installed."""
    if not TINKER.installed:
        raise MediaTypeError(f"This server reads no protobuf: {TINKER.missing}. Or use SDK 0.24.1, which sends JSON.")
    from tinker.proto import tinker_public_pb2

    return tinker_public_pb2


def available() -> bool:
    """Whether messages can be read and written."""
    return TINKER.installed


def loss_request(raw: bytes, encoding: str, limit: int) -> LossRequest:
    """Reads the body of `forward_backward`. Call it in a worker thread.

    Args:
        encoding: the Content-Encoding header: `zstd` or nothing.
        limit: the most bytes that the body may have when it is unpacked.

    Raises:
        MediaTypeError: there is no such encoding, or the package is not installed.
        BodyTooLargeError: the body is over the limit.
        InvalidRequestError: it is not such a message, or does not name its model.
    """
    message = _messages().ForwardBackwardRequest()
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(_unpacked(raw, encoding, limit))
    except DecodeError as error:
        raise InvalidRequestError(f"The body is not a ForwardBackwardRequest: {error}") from None
    if not message.model_id:
        raise InvalidRequestError("model_id: is missing", param="model_id")
    return LossRequest(message.model_id, message.seq_id, message.forward_only, message)


def _unpacked(raw: bytes, encoding: str, limit: int) -> bytes:
    if encoding in ("", "identity"):
        return raw
    if encoding != "zstd":
        raise MediaTypeError("Send the body as it is, or with `Content-Encoding: zstd`.")
    import zstandard

    try:
        unpacked: bytes = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequestError(f"The body is not zstd: {error}") from None
    if len(unpacked) > limit:
        raise BodyTooLargeError(f"The unpacked body is over the limit of {limit} bytes.")
    return unpacked


def _datum(message: Any) -> TinkerDatum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise InvalidRequestError("model_input: only chunks of tokens (encoded_text) are supported", "model_input")
        tokens += _array(chunk.encoded_text.tokens, np.int32)
    return TinkerDatum(tuple(tokens), {name: _tensor(name, each) for name, each in message.loss_fn_inputs.items()})


def _tensor(name: str, message: Any) -> Tensor:
    messages = _messages()
    dtypes: dict[int, type[np.generic]] = {
        messages.DTYPE_FLOAT32: np.float32,
        messages.DTYPE_INT64: np.int64,
        messages.DTYPE_INT32: np.int32,
    }
    if message.WhichOneof("encoding") != "dense" or message.dtype not in dtypes:
        raise InvalidRequestError(f"{name}: only dense tensors of float32, int64 or int32 are supported", param=name)
    values = _array(message.dense, dtypes[message.dtype])
    if not all(map(math.isfinite, values)):
        raise InvalidRequestError(f"{name}: its numbers must be finite", param=name)
    return Tensor(values, tuple(message.shape) or None)


def _array(raw: bytes, dtype: type[np.generic]) -> list[Any]:
    if len(raw) % np.dtype(dtype).itemsize:
        raise InvalidRequestError(f"an array has {len(raw)} bytes, which is no whole number of its values")
    return cast(list[Any], np.frombuffer(raw, dtype).tolist())


# -- results ---------------------------------------------------------------------------------------


def loss_output(logprobs: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes | None:
    """A `ForwardBackwardOutput`. None: the package is not installed."""
    if not available():
        return None
    messages = _messages()
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    field = record.fields["logprobs"]
    field.dtype = messages.DTYPE_FLOAT32
    field.data = _floats([value for values in logprobs for value in values])
    ends = np.cumsum([0, *map(len, logprobs)], dtype=np.int64) * np.dtype(np.float32).itemsize
    field.offsets = ends.tobytes()
    for name, value in metrics.items():
        output.metrics[name] = value
    return cast(bytes, output.SerializeToString())


def sample_response(
    sequences: Sequence[Drawn],
    prompt_logprobs: Sequence[float | None] | None,
    prompt_top: Sequence[Sequence[tuple[int, float]] | None] | None,
    cached_tokens: int,
) -> bytes | None:
    """A `SampleResponse`. None: the package is not installed."""
    if not available():
        return None
    messages = _messages()
    response = messages.SampleResponse(prompt_cache_hit_tokens=cached_tokens)
    for each in sequences:
        reason = messages.STOP_REASON_STOP if each.stopped else messages.STOP_REASON_LENGTH
        written = response.sequences.add(stop_reason=reason, tokens=np.array(each.tokens, np.int32).tobytes())
        written.logprobs = _floats(each.logprobs)
        if each.top:
            _write_top(written.topk_sampled_logprobs, each.top)
    if prompt_logprobs is not None:
        response.prompt_logprobs = _floats([math.nan if value is None else value for value in prompt_logprobs])
    if prompt_top is not None:
        _write_top(response.topk_prompt_logprobs, prompt_top)
    return cast(bytes, response.SerializeToString())


def _write_top(message: Any, top: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    width = max((len(best) for best in top if best is not None), default=0)
    ids, logprobs = np.zeros((len(top), width), np.int32), np.full((len(top), width), _MASKED, np.float32)
    for at, best in enumerate(top):
        for place, (token, logprob) in enumerate(best or ()):
            ids[at, place], logprobs[at, place] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(top)


def _floats(values: Sequence[float]) -> bytes:
    return np.array(values, np.float32).tobytes()
