"""Multi-token-prediction heads: one more decoder layer with which a checkpoint predicts the token after the next one.

    position      i                i + 1
    trunk         h(i)  ─────┐                        h: the trunk's output, after its last norm
    tokens                   │     t(i + 1)
    head           eh_proj(concat(enorm(embed(t)), hnorm(h))) ─▶ decoder layer ─▶ norm ─▶ h'(i + 1) ─▶ t(i + 2)

Embedding and output head are those of the base model. To draft more tokens, h' takes the place of h. DeepSeek-V3
Technical Report, 2024, section 2.2; the checkpoints' own code shows that h and h' are taken after the norms.

mlx-lm drops these weights when it loads a checkpoint. Here they become a model of one layer of the same family, which
mlx-lm's own code builds, cleans and quantizes, with `HeadInput` in place of the embedding.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_parallm.errors import UnsupportedModelError
from mlx_parallm.model.cache_plan import CachePlan, prepare
from mlx_parallm.model.device import adapt_to_cpu, on_cpu
from mlx_parallm.model.packing import to_float32
from mlx_parallm.model.split import OutputHead, owner_of, trunk_of

_log = logging.getLogger(__name__)

Weights = dict[str, mx.array]

_DECLARED = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json that say how many such layers a checkpoint has: of DeepSeek and GLM, and of Qwen."""

_ONE_LAYER: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "full_attention_interval": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
"""A configuration whose only layer is of the kind that heads have: full attention, and experts if there are any."""

_OF_DEEPSEEK = re.compile(r"(?P<before>.*)layers\.(?P<number>\d+)\.eh_proj\.weight")
_OF_QWEN = re.compile(r"(?:.*\.)?mtp\.(?P<name>.*)")
_NAMES_OF_QWEN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
    "layers.0.": "",
}
"""What Qwen's names are in DeepSeek's."""

_EXPERT = re.compile(r"(?P<before>.*)\.experts\.(?P<number>\d+)\.(?P<name>.*)")


class HeadInput(nn.Module):  # type: ignore[misc]
    """Takes the place of the embedding: makes the input of the layer from tokens and hidden states.

    Attributes:
        embed: the embedding of the base model.

    Args:
        dims: width of the hidden states.
        eps: of the norms.
    """

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm = nn.RMSNorm(dims, eps), nn.RMSNorm(dims, eps)
        self.eh_proj = nn.Linear(2 * dims, dims, bias=False)
        self.embed: Callable[[mx.array], mx.array] = self._zeros
        self._hidden: mx.array | None = None

    def __call__(self, tokens: mx.array) -> mx.array:
        """[B, T] → [B, T, D]. Without hidden states they are zeros, as for passes that are only timed."""
        hidden = self._zeros(tokens) if self._hidden is None else self._hidden.reshape(*tokens.shape, -1)
        joined = mx.concatenate([self.enorm(self.embed(tokens)), self.hnorm(hidden)], axis=-1)
        return self.eh_proj(joined)  # type: ignore[no-any-return]

    def take(self, hidden: mx.array | None) -> None:
        """Sets the hidden states before the tokens of the next passes, [.., D] with as many as these have tokens."""
        self._hidden = hidden

    def _zeros(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self.enorm.weight.size), self.enorm.weight.dtype)


@dataclass(frozen=True, slots=True)
class PredictionHead:
    """A model of one layer, from tokens and the hidden states before them to logits. `plan`: how it runs."""

    model: nn.Module
    plan: CachePlan

    @property
    def input(self) -> HeadInput:
        return trunk_of(self.model).embed_tokens  # type: ignore[union-attr, no-any-return]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights; those that it shares with the base model do not count."""
        return sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))


def load_head(base: nn.Module, source: Path, config: Mapping[str, Any]) -> PredictionHead | None:
    """The first prediction head of a checkpoint. None if it has none. One that cannot be used is logged and left out.

    Args:
        base: the model of the checkpoint.
        source: its directory.
        config: its config.json.
    """
    if not any(_OF_DEEPSEEK.fullmatch(name) or _OF_QWEN.fullmatch(name) for name in _names_in(source)):
        if any(section.get(key) for section in _sections(config) for key in _DECLARED):
            _log.info("%s is served without a prediction head: its files have no weights of one", source.name)
        return None
    try:
        model = _loaded(base, source, config)
        head = attached(model, base)
        if not head.plan.layout.rolls_back:
            raise UnsupportedModelError("its layer keeps a state")
    except Exception as error:  # noqa: BLE001 - mlx-lm's code reads foreign files, and drafts are no need
        _log.info("%s is served without its prediction head: %s", source.name, str(error).partition("\n")[0])
        return None
    _log.info("%s drafts with its own prediction head", source.name)
    return head


def attached(model: nn.Module, base: nn.Module) -> PredictionHead:
    """A head that uses the embedding and the output head that the base model has now."""
    trunk, output = trunk_of(base), OutputHead(base)
    assert trunk is not None

    def logits(hidden: mx.array) -> mx.array:
        flat = output(hidden.reshape(-1, hidden.shape[-1]))
        return flat.reshape(*hidden.shape[:-1], -1)

    owner_of(model).lm_head = logits
    trunk_of(model).embed_tokens.embed = trunk.embed_tokens.__call__  # type: ignore[union-attr]
    return PredictionHead(model, prepare(model))


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration, and that of the language part if the model also reads images."""
    yield config
    if isinstance(text := config.get("text_config"), dict):
        yield text


def _names_in(source: Path) -> Iterator[str]:
    """The names of a directory's weights, which are not read."""
    for file in source.glob("model*.safetensors"):
        weights: Any = mx.load(str(file))
        yield from weights


# -- loading -------------------------------------------------------------------------------------


def _loaded(base: nn.Module, source: Path, config: Mapping[str, Any]) -> nn.Module:
    architecture = sys.modules[type(base).__module__]
    overrides = dict(_ONE_LAYER)
    if isinstance(text := config.get("text_config"), dict):
        overrides["text_config"] = {**text, **_ONE_LAYER}
    if isinstance(quantization := config.get("quantization"), dict):  # without what it says of each layer
        overrides["quantization"] = {key: value for key, value in quantization.items() if not isinstance(value, dict)}
    classes = _head_class(architecture.Model), architecture.ModelArgs
    model, _ = load_model(source, lazy=True, model_config=overrides, get_model_classes=lambda config: classes)
    if on_cpu():
        to_float32(model)
    mx.eval(model.parameters())
    if on_cpu():
        adapt_to_cpu(model)
    return model


def _head_class(family: Any) -> type[nn.Module]:
    """A family's class of models with the weights of the head instead of those of all layers."""

    class Head(family):  # type: ignore[misc]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            owner_of(self).lm_head = lambda hidden: hidden
            trunk = trunk_of(self)
            assert trunk is not None
            trunk.embed_tokens = HeadInput(trunk.norm.weight.size, trunk.norm.eps)

        def sanitize(self, weights: Weights) -> Weights:
            trunk = next(path for path, part in self.named_modules() if part is trunk_of(self))
            return _clean(weights, trunk, super().sanitize)

    return Head


def _clean(weights: Weights, trunk: str, sanitize: Callable[[Weights], Weights]) -> Weights:
    """The weights of the head, by the names of the model of one layer.

    Args:
        weights: all of the checkpoint.
        trunk: the path of the model's trunk.
        sanitize: mlx-lm's function for the family, which also changes weights: it adds 1 to the norms of some. So the
            norms of the input are given to it in the place of the last norm.
    """
    before, own = _of_head(weights)
    enorm, hnorm, norm = (own.pop(f"{name}.weight") for name in ("enorm", "hnorm", "shared_head.norm"))
    layer = {f"{before}layers.0.{name}": array for name, array in own.items()}
    if of_all := next((name for name in weights if name.endswith("conv1d.weight")), None):
        layer[f"{before}layers.0.conv1d.weight"] = weights[of_all]  # shows Qwen3.5's function who wrote the file

    def cleaned(norm: mx.array) -> Weights:
        return sanitize({**layer, f"{before}norm.weight": norm})

    clean = {name: array for name, array in cleaned(norm).items() if "conv1d" not in name}
    for name, weight in (("enorm", enorm), ("hnorm", hnorm)):
        clean[f"{trunk}.embed_tokens.{name}.weight"] = cleaned(weight)[f"{trunk}.norm.weight"]
    moved = {name.replace(".layers.0.eh_proj.", ".embed_tokens.eh_proj."): array for name, array in clean.items()}
    return _stacked(moved)


def _of_head(weights: Weights) -> tuple[str, Weights]:
    """The prefix of the trunk's names, and the weights of the first head by DeepSeek's names.

    Raises:
        UnsupportedModelError: there is no head that is computed as above.
    """
    places = [found for name in weights if (found := _OF_DEEPSEEK.fullmatch(name))]
    if places:
        first = min(places, key=lambda place: int(place["number"]))
        start = f"{first['before']}layers.{first['number']}."
        own = {name.removeprefix(start): array for name, array in weights.items() if name.startswith(start)}
        shared = ("embed_tokens.", "shared_head.head.")
        return first["before"], {name: array for name, array in own.items() if not name.startswith(shared)}
    of_qwen = {match["name"]: array for name, array in weights.items() if (match := _OF_QWEN.fullmatch(name))}
    pairs = [(name, old, new) for name in of_qwen for old, new in _NAMES_OF_QWEN.items() if name.startswith(old)]
    own = {new + name.removeprefix(old): of_qwen[name] for name, old, new in pairs}
    if "eh_proj.weight" not in own:
        raise UnsupportedModelError("it is of another kind than those that can be computed here")
    return "model.", own


def _stacked(weights: Weights) -> Weights:
    """Experts that are stored one by one, which the family's function leaves so, as one array each."""
    stacked: dict[str, dict[int, mx.array]] = {}
    rest: Weights = {}
    for name, array in weights.items():
        if match := _EXPERT.fullmatch(name):
            stacked.setdefault(f"{match['before']}.switch_mlp.{match['name']}", {})[int(match["number"])] = array
        else:
            rest[name] = array
    return rest | {name: mx.stack([each[number] for number in sorted(each)]) for name, each in stacked.items()}
