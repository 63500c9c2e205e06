"""Reads a reward model's directory: an adapter in PEFT's format with the weight [1, hidden] of a scalar head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_parallm.adapters.files.disk import (
    CONFIG_FILE,
    Float32,
    Header,
    described,
    open_weights,
    problem,
    read_config,
    read_header,
)
from mlx_parallm.adapters.files.peft import PEFT_WEIGHTS, SCORE, SCORE_WEIGHT, PeftFormat, is_scorer
from mlx_parallm.adapters.files.read import pairs_of, planned, read_factors
from mlx_parallm.adapters.weights import AdapterLayout, AdapterWeights

_OF_THE_HEAD = frozenset({"task_type", "modules_to_save"})
_HEADS = frozenset({SCORE, "classifier"})
"""Heads that PEFT lists in `modules_to_save` of every reward model. A model has one of them."""


@dataclass(frozen=True, slots=True)
class RewardModelWeights:
    """The weights of a reward model: its adapter, and its head [hidden], which gives the reward head · hidden state."""

    adapter: AdapterWeights
    head: Float32


def read_reward_model(folder: Path, layout: AdapterLayout, max_rank: int) -> RewardModelWeights:
    """Reads and checks the reward model in `folder`. Blocks on the disk, so call it neither on the event loop nor on
    the device thread.

    Raises:
        AdapterFileError: the files are malformed, of another model, or not those of a reward model.
    """
    form = _form_of(read_config(folder, None))
    with open_weights(folder, PEFT_WEIGHTS, None) as file:
        header = read_header(file, PEFT_WEIGHTS)
        _check_head(header, layout)
        factors = {name: info for name, info in header.tensors.items() if name != SCORE_WEIGHT}
        plans = planned(form, replace(header, tensors=factors), layout, max_rank)
        _, tensors = read_factors(form, file, header, plans, layout, [SCORE_WEIGHT])
    adapter = AdapterWeights(pairs_of(plans, tensors, layout, form.transposed, max_rank), form.rslora)
    return RewardModelWeights(adapter, tensors[SCORE_WEIGHT][0])


def check_reward_model(folder: Path) -> None:
    """Checks the config alone, without the weights. Raises AdapterFileError: it is not that of a reward model."""
    _form_of(read_config(folder, None))


def is_reward_model(folder: Path) -> bool:
    """Whether the config in a folder says that it is a reward model. Raises AdapterFileError: it cannot be read."""
    return is_scorer(read_config(folder, None))


def _form_of(config: Mapping[str, Any]) -> PeftFormat:
    if not is_scorer(config):
        raise problem(
            f"{CONFIG_FILE} is not that of a reward model: its task_type is {described(config.get('task_type'))}"
        )
    heads = config.get("modules_to_save")
    if not isinstance(heads, list) or SCORE not in heads or not set(heads) <= _HEADS:
        raise problem(f"{CONFIG_FILE}: modules_to_save of a reward model must name its head, {SCORE!r}, and no more")
    return PeftFormat({key: value for key, value in config.items() if key not in _OF_THE_HEAD})


def _check_head(header: Header, layout: AdapterLayout) -> None:
    if SCORE_WEIGHT not in header.tensors:
        raise problem(f"{PEFT_WEIGHTS} has no {SCORE_WEIGHT}: a reward model has a head")
    shape, wanted = header.tensors[SCORE_WEIGHT].shape, (1, layout.hidden)
    if shape != wanted:
        raise problem(
            f"{SCORE_WEIGHT} is {list(shape)}, but a head that gives one number for this model is {list(wanted)}: is "
            "it of another base model, or a classifier?"
        )
