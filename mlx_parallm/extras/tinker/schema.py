"""Request bodies of the Tinker API, as the SDK 0.24.1 writes them in JSON; later SDKs add fields.

Source: the modules `tinker.types` of the PyPI package `tinker`.

A body that asks for training is checked in two steps. First come `model_id` and `seq_id`, by which the request takes
its place in the order of the model's requests. All else is checked when its turn comes: a mistake there fails the
request and not those after it, which would otherwise wait for a request that never comes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_parallm.server.api.bodies import MAX_SEQUENCES, MAX_STOP_CHARACTERS, MAX_STOPS
from mlx_parallm.server.api.fields import INT32_MAX, Neutral, OpenBody, WireInput

MAX_ID, MAX_NAME, MAX_TOP, MAX_STOP_TOKENS = 256, 48, 20, 64
NAME = rf"^[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}$"
"""Names of checkpoints."""

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
Number = Annotated[int, Field(ge=0, le=INT32_MAX)]
Token = Annotated[int, Field(ge=0, le=INT32_MAX)]


class TinkerBody(OpenBody):
    """What every body may have."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type", "user_metadata", "ttl_seconds"})


# -- sessions and models ---------------------------------------------------------------------------


class SessionBody(TinkerBody):
    """`create_session`."""

    IGNORED: ClassVar[frozenset[str]] = TinkerBody.IGNORED | {"tags", "sdk_version", "project_id", "display_name"}


class HeartbeatBody(TinkerBody):
    """`session_heartbeat`."""

    session_id: Id


class LoraConfig(OpenBody):
    """The adapter that a new model trains."""

    rank: Annotated[int, Field(ge=1, le=INT32_MAX)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamOptimizer(OpenBody):
    """The optimizer of a new model: only Adam."""

    type: Literal["adamw", "adam"] = "adamw"


class CreateModelBody(TinkerBody):
    """`create_model`."""

    session_id: Id
    model_seq_id: Number
    base_model: Id
    lora_config: LoraConfig | None = None
    optimizer_config: AdamOptimizer = AdamOptimizer()


class ModelBody(TinkerBody):
    """A body that names a model: `get_info`, `unload_model`."""

    model_id: Id


class OrderedBody(ModelBody):
    """A body that has a place in the order of its model's requests. Without `seq_id` it comes after all others."""

    seq_id: Number | None = None


# -- training --------------------------------------------------------------------------------------


class ForwardBackwardBody(OrderedBody):
    """`forward_backward` in JSON."""

    forward_backward_input: dict[str, Any] = Field(default_factory=dict)


class ForwardBody(OrderedBody):
    """`forward`."""

    forward_input: dict[str, Any] = Field(default_factory=dict)


class OptimStepBody(OrderedBody):
    """`optim_step`. `optimizer_params`: settings of other optimizers, which are refused."""

    adam_params: dict[str, Any] = Field(default_factory=dict)
    optimizer_params: dict[str, Any] = Field(default_factory=dict)


class SaveBody(OrderedBody):
    """`save_weights`, and `save_weights_for_sampler`, which has a name (`path`) or a `sampling_session_seq_id`. `kind`:
    other kinds of sampling clients than snapshots are refused."""

    kind: Annotated[str, Field(max_length=MAX_ID)] = "snapshot"
    path: Annotated[str, Field(max_length=MAX_ID)] | None = None
    overwrite: bool = False
    sampling_session_seq_id: Number | None = None


class LoadBody(TinkerBody):
    """`load_weights`: into the model `model_id`, or into a new model of `session_id`."""

    IGNORED: ClassVar[frozenset[str]] = TinkerBody.IGNORED | {"weights_access_token"}

    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Id | None = None
    path: Id
    optimizer: bool = False
    optimizer_config: AdamOptimizer = AdamOptimizer()


class TensorBody(WireInput):
    """A dense tensor."""

    NEUTRAL: ClassVar[Neutral] = {"sparse_crow_indices": (), "sparse_col_indices": ()}

    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[Annotated[int, Field(ge=0)]] | None = None


class ChunkBody(WireInput):
    """A chunk of a prompt: tokens. Images and sound are refused."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token]


class ModelInputBody(WireInput):
    """A prompt in chunks."""

    chunks: list[ChunkBody]

    def ids(self) -> tuple[int, ...]:
        """The tokens of all chunks."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class DatumBody(WireInput):
    """One sequence to train on, with the arrays that the loss reads."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"model_input_spans", "loss_fn_input_spans"})

    model_input: ModelInputBody
    loss_fn_inputs: dict[str, TensorBody]


class LossBody(WireInput):
    """`forward_backward_input` and `forward_input`."""

    data: Annotated[list[DatumBody], Field(min_length=1)]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = Field(default_factory=dict)


class AdamBody(WireInput):
    """`adam_params`, with the SDK's defaults."""

    learning_rate: Annotated[float, Field(ge=0, le=10)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


# -- sampling --------------------------------------------------------------------------------------


class SamplingSessionBody(TinkerBody):
    """`create_sampling_session`: of the base model, or of saved weights."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: Id | None = None
    model_path: Id | None = None


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class SamplingParamsBody(OpenBody):
    """How tokens are sampled. `stop`: texts, token ids, or an empty list, with which nothing ends a sequence early;
    null means the model's own end of a text."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        _Stop
        | Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
        | Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(TinkerBody):
    """`asample`: of a sampling session, or of `model_path` or `base_model`."""

    NEUTRAL: ClassVar[Neutral] = {
        "target_prompt_logprobs": (),
        "prompt_alt_tokens_k": (0,),
        "record_stability_info": (False,),
    }

    num_samples: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = 1
    prompt: ModelInputBody
    sampling_params: SamplingParamsBody
    base_model: Id | None = None
    model_path: Id | None = None
    sampling_session_id: Id | None = None
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


# -- everything else -------------------------------------------------------------------------------


class FutureBody(TinkerBody):
    """`retrieve_future` and `cancel_future`."""

    IGNORED: ClassVar[frozenset[str]] = TinkerBody.IGNORED | {"allow_metadata_only"}

    request_id: Id


class WeightsInfoBody(TinkerBody):
    """`weights_info`."""

    tinker_path: Id
