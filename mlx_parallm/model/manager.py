"""The loaded base model, and an adapter's checkpoints by name. A Python program can use both classes without a server:

manager = SharedModelManager("path/to/model")
checkpoints = CheckpointManager(manager)
checkpoints.save_checkpoint("checkpoint-1", weights)
checkpoints.hot_swap(manager, "checkpoint-1")
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlx_parallm.adapters.bank import AdapterBank, GroupMaker, LinearGroup, ModelSplit
from mlx_parallm.adapters.cards import CheckpointCard
from mlx_parallm.adapters.checkpoints import CheckpointStore
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.forward_context import OneAdapter
from mlx_parallm.adapters.runs import adapter_in, step_of
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights
from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.engine import ModelCard
from mlx_parallm.errors import UnknownModelError, UnsupportedModelError
from mlx_parallm.model.cache_plan import CachePlan, prepare
from mlx_parallm.model.device import adapt_to_cpu, on_cpu, prepare_device
from mlx_parallm.model.families import family_of
from mlx_parallm.model.layer_state import KVLayout
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.model.loading import LoadedModel, generation_defaults, load, materialize
from mlx_parallm.model.mtp import PredictionHead, load_head
from mlx_parallm.model.tokenizer import Tokenizer

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_NO_LIMIT = 10**9
"""Transformers gives a tokenizer without a limit a huge model_max_length."""

_WITHOUT_ATTENTION = 1 << 17
"""The context length of a model without attention that declares none: its memory does not grow with a sequence."""


class SharedModelManager:
    """A loaded model with its tokenizer and description. Serving, training and the KL reference share one of them.

    Its arrays belong to the thread that created it. A model whose `family` is not tested must pass
    `engine.startup.prove` before it serves. On a CPU the weights become float32; on Metal and CUDA they stay as they
    are stored.

    model: the mlx-lm module
    adapter_layout: the linears that LoRA adapters may change
    bank: the adapter bank that they read; None before `install_bank`
    card: its name, sizes and types for clients
    plan: how it runs over packed tokens, and what its caches keep for each sequence
    split: how the model is divided among several machines; None if it is whole. `model`, `plan` and
        `card.weight_bytes` are those of this machine's part, all else is as if it were whole

    Args:
        path_or_id: a directory or hub id of a model that mlx-lm can load. None means the bundled model.
        trust_remote_code: whether Python code that comes with the model may run.
        allow_special_tokens: see `Tokenizer`.
        tool_parser: see `Tokenizer`.
        reasoning_parser: see `Tokenizer`.
        template_variables: see `Tokenizer`.
        progress: whether to report progress on stderr.
        loaded: the model of `path_or_id` as `load` returns it; None: it is loaded here.
        split: keeps this machine's part of a model that is divided among several, of which each makes a manager at the
            same time; None: the model is whole.

    Raises:
        ModelNotFoundError: there is no such directory or hub model.
        UnsupportedModelError: the architecture cannot be loaded, or cannot be batched.
    """

    def __init__(
        self,
        path_or_id: str | Path | None = None,
        *,
        trust_remote_code: bool = False,
        allow_special_tokens: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_variables: Mapping[str, object] = MappingProxyType({}),
        progress: bool = True,
        loaded: LoadedModel | None = None,
        split: Callable[[nn.Module], ModelSplit] | None = None,
    ) -> None:
        prepare_device()
        loaded = loaded or load(
            None if path_or_id is None else str(path_or_id),
            dequantize=on_cpu(),
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        self.model = loaded.model
        self.family = family_of(self.model)
        self.adapter_layout = adapter_layout(self.model, loaded.source)
        parameters = get_total_parameters(self.model)
        self.split = None if split is None else split(self.model)
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:  # its vocabulary takes a second
            options = (allow_special_tokens, tool_parser, reasoning_parser, template_variables)
            tokenizer = beside.submit(Tokenizer, loaded.tokenizer, *options)
            materialize(self.model, loaded.name, progress)
        if on_cpu():
            adapt_to_cpu(self.model)
        self.plan: CachePlan = prepare(self.model)
        self.tokenizer = tokenizer.result()
        self.card = ModelCard(
            name=loaded.name,
            context_length=_context_length(loaded, self.plan.layout),
            vocab_size=self.plan.vocab_size,
            quantization=_quantization(loaded.config),
            dtype=str(self.plan.layout.dtype).removeprefix("mlx.core."),
            parameters=parameters,
            weight_bytes=sum(array.nbytes for _, array in tree_flatten(self.model.parameters())),
            tokenizer=str(loaded.source.resolve()) if loaded.source.is_dir() else "",
            generation_defaults=generation_defaults(loaded.source),
            architecture=self.family.name,
        )
        self._loaded = loaded
        self.bank: AdapterBank | None = None
        self._loras: dict[str, OneAdapter] = {}

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the base model for which adapters are saved: 32 hex digits."""
        return self._loaded.fingerprint

    @property
    def source(self) -> Path:
        """The model's directory, or the GGUF file of the bundled model."""
        return self._loaded.source

    def load_head(self) -> PredictionHead | None:
        """The prediction head of the model's checkpoint; None if it has none that can be used, or if the model is
        divided."""
        return None if self.split is not None else load_head(self.model, self.source, self._loaded.config)

    def install_bank(
        self, slots: int, max_rank: int, limit: int = sys.maxsize, make_group: GroupMaker = LinearGroup
    ) -> AdapterBank:
        """Makes an empty adapter bank of at most `limit` bytes and lets the model's linears read from it. Call it once
        for each model."""
        assert self.bank is None
        self.bank = AdapterBank(self.adapter_layout, slots, max_rank, self.plan.layout.dtype, limit, make_group)
        install_adapters(self.model, self.bank)
        return self.bank

    def refuse_adapters(self, reason: str) -> None:
        """From now on, no adapter may change the model. `reason`: the kind of LoRA, as in `AdapterLayout.refused`."""
        refused = {spec.path: reason for spec in self.adapter_layout} | dict(self.adapter_layout.refused)
        self.adapter_layout = replace(self.adapter_layout, linears={}, refused=refused, head=None)
        if self.bank is not None:
            self.bank.layout = self.adapter_layout

    # -- by hand: one adapter for every call of `model` ----------------------------------------------

    def add_lora(self, name: str, adapter: AdapterWeights | Path | str) -> None:
        """Registers an adapter (its weights, or its folder in mlx-lm's or PEFT's format) for `switch_lora`.

        Raises:
            AdapterFileError: the folder cannot be read, or the adapter is not for this model.
        """
        self._loras[name] = OneAdapter(as_weights(adapter, self.adapter_layout), self.plan.layout.dtype)

    def switch_lora(self, name: str) -> None:
        """Makes `model(tokens)` use the adapter from now on; `base` means none.

        For programs that call the model themselves. The base's weights are not copied. A running engine is not
        affected, because its sequences have their own adapters.

        Raises:
            UnknownModelError: no adapter has that name.
        """
        if name != BASE_ADAPTER.name and name not in self._loras:
            known = ", ".join([BASE_ADAPTER.name, *self._loras])
            raise UnknownModelError(f"no adapter is called {name!r}; known: {known}. add_lora makes one known")
        bank = self.bank or self.install_bank(slots=0, max_rank=1)
        bank.context = self._loras.get(name)


def as_weights(adapter: AdapterWeights | Path | str, layout: AdapterLayout) -> AdapterWeights:
    """The weights of an adapter. If it is a folder, they are read from it."""
    if isinstance(adapter, AdapterWeights):
        return adapter
    return read_adapter(adapter_in(Path(adapter)), layout, max_rank=sys.maxsize).weights


def _quantization(config: dict[str, Any]) -> str:
    """How the weights are stored, and whether they were dequantized."""
    quantization = config.get("quantization") or config.get("quantization_config")
    if not quantization:
        return "none"
    stored = f"{quantization['bits']}-bit" if "bits" in quantization else str(quantization.get("quant_method"))
    return f"{stored}, dequantized" if on_cpu() else stored


def _context_length(loaded: LoadedModel, layout: KVLayout) -> int:
    for length in _declared_lengths(loaded):
        if isinstance(length, int) and 0 < length < _NO_LIMIT:
            return length
    if not layout.attention:
        return _WITHOUT_ATTENTION
    raise UnsupportedModelError(f"no context length in the config: add {_CONTEXT_KEYS[0]} to config.json")


def _declared_lengths(loaded: LoadedModel) -> Iterator[Any]:
    """The places that may declare a context length, best first. A multimodal model has its text model nested."""
    for section in (loaded.config, loaded.config.get("text_config") or {}):
        yield from (section.get(key) for key in _CONTEXT_KEYS)
    for module in (loaded.model, getattr(loaded.model, "language_model", None)):
        yield from (getattr(getattr(module, "args", None), key, None) for key in _CONTEXT_KEYS)
    yield loaded.tokenizer.model_max_length


# -- checkpoints by name -------------------------------------------------------------------------


class CheckpointManager:
    """The checkpoints of one adapter in `folder`, which `--checkpoint-dir` can serve too.

    The server and the trainer use the `CheckpointStore` beneath, which holds several adapters and their versions.

    A checkpoint's name is `checkpoint-<step>`. Any other name is a tag, given to the checkpoint at the next free step.
    `latest` is the newest one.

    Args:
        base_model: the model for which the adapter is made: a directory, a hub id, a loaded model, or None for the
            bundled model. Only its layers are read.
        folder: where the checkpoints are kept.
        keep: how many of the newest checkpoints are kept. Those with a tag are kept too.
        adapter: the adapter's name.

    Raises:
        ConfigError: the folder cannot be made or read.
        ModelError: the base model cannot be loaded.
    """

    def __init__(
        self,
        base_model: SharedModelManager | Path | str | None = None,
        folder: Path | str = "checkpoints",
        keep: int = 10,
        adapter: str = "default",
    ) -> None:
        if isinstance(base_model, SharedModelManager):
            layout, fingerprint = base_model.adapter_layout, base_model.fingerprint
        else:
            base = load(None if base_model is None else str(base_model), dequantize=False)
            layout, fingerprint = adapter_layout(base.model, base.source), base.fingerprint
        self._layout = layout
        self._store = CheckpointStore(Path(folder), layout, fingerprint, max_rank=sys.maxsize, keep=keep)
        self._adapter = adapter

    def names(self) -> tuple[str, ...]:
        """The names of all checkpoints and their tags, oldest first."""
        return tuple(name for card in self._store.cards(self._adapter) for name in (card.name, *card.tags))

    def save_checkpoint(self, name: str, adapter: AdapterWeights | Path | str) -> CheckpointCard:
        """Writes an adapter, given as weights or as a folder in mlx-lm's or PEFT's format. The write is atomic.

        Raises:
            InvalidRequestError: the name cannot be used, or the adapter is not for the base model.
            ConflictError: that step has other weights.
            StorageError: the disk failed; other checkpoints are untouched.
        """
        weights = as_weights(adapter, self._layout)
        step = step_of(name)
        version = AdapterRef(self._adapter, self._store.newest_version(self._adapter) + 1)
        return self._store.save_checkpoint(version, weights, step, tags=() if step is not None else (name,))

    def load_checkpoint(self, name: str = "latest") -> AdapterWeights:
        """Reads the weights, after checking the checksums of all files and the base model.

        Raises:
            UnknownModelError: there is no such checkpoint.
            AdapterFileError: a file is damaged, or the checkpoint belongs to another base model.
        """
        return self._store.load_checkpoint(self._adapter, name).weights

    def hot_swap(self, manager: SharedModelManager, name: str = "latest") -> None:
        """Makes a loaded model use a checkpoint. If it cannot be loaded, the model keeps its adapter.

        Raises:
            UnknownModelError, AdapterFileError: see `load_checkpoint`.
        """
        manager.add_lora(name, self.load_checkpoint(name))
        manager.switch_lora(name)
