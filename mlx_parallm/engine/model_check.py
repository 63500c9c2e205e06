"""What a model can do here, found by comparing its first layers with mlx-lm's own code.

A model of a family that no test covers is checked once, in a child process, because a wrong shape can corrupt memory.
The verdict is kept in a file by what it depends on: the model's configuration, the device, and the versions of MLX,
mlx-lm and this package.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_parallm import __version__
from mlx_parallm.adapters.bank import AdapterBank
from mlx_parallm.atomic import replace_file
from mlx_parallm.engine.startup import Prover, prove
from mlx_parallm.errors import MALFORMED, UnsupportedModelError
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.cache_plan import CachePlan, prepare
from mlx_parallm.model.device import adapt_to_cpu, on_cpu, prepare_device
from mlx_parallm.model.families import Finding, family_of, untried_packages
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.model.linears import install_adapters
from mlx_parallm.model.loading import find_model, keep_few_layers, materialize, model_in
from mlx_parallm.model.manager import SharedModelManager
from mlx_parallm.model.packing import to_float32
from mlx_parallm.train.check import gradients
from mlx_parallm.train.model import TrainableModel

_SLOTS, _RANK = 2, 4
_TIMEOUT_S = 600.0
"""A check takes seconds; on a machine that has no memory left it may take minutes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """What a model can do.

    family: its model file
    layers: "3 of 36": the first of all, which were checked
    compatible: it runs row by row
    in_parts: the kinds of modules that run in parts, by their paths without numbers
    findings: of all checks that were made
    """

    family: str
    layers: str
    compatible: bool
    in_parts: tuple[str, ...]
    findings: tuple[Finding, ...]

    def of(self, check: str) -> Finding:
        """What one check has found. One that was not made has found nothing."""
        return next((each for each in self.findings if each.check == check), Finding(check, None))

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> ModelVerdict:
        """From what `dataclasses.asdict` has given."""
        findings = tuple(Finding(**each) for each in data["findings"])
        return cls(data["family"], data["layers"], data["compatible"], tuple(data["in_parts"]), findings)


def check_model(path: str | None, trust_remote_code: bool = False, compatible: bool = False) -> ModelVerdict:
    """Checks the first layers of a model in this process. A plan that is right for rows of the base model is looked for
    first.

    Args:
        path: a directory or a hub id; None: the bundled model.
        compatible: only row by row.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: it does not run.
    """
    prepare_device()
    model = load_bundled(False)[0] if path is None else model_in(find_model(path), trust_remote_code)[0]
    few, layers = keep_few_layers(model)
    if on_cpu():
        to_float32(model)
    materialize(model, "", False)
    return replace(check_built(model, compatible), layers=f"{few} of {layers}")


def check_built(model: nn.Module, compatible: bool = False) -> ModelVerdict:
    """Checks a model in memory, whose linears are replaced by adapted ones. See `check_model`."""
    layout = adapter_layout(model)
    if on_cpu():
        adapt_to_cpu(model)
    bank = AdapterBank(layout, _SLOTS, _RANK, prepare(model).layout.dtype)
    install_adapters(model, bank)
    plan = prepare(model, compatible)
    batch = Prover(model, bank, plan).batch(beyond_windows=True)
    if batch.problem and not plan.compatible:
        plan = prepare(model, compatible=True)
        batch = Prover(model, bank, plan).batch(beyond_windows=True)
    findings = (batch, *_others(model, bank, plan)) if not batch.problem else (batch,)
    layers = len(model.layers)
    return ModelVerdict(family_of(model).name, f"{layers} of {layers}", plan.compatible, _kinds(plan.mixers), findings)


def _others(model: nn.Module, bank: AdapterBank, plan: CachePlan) -> Iterator[Finding]:
    prover = Prover(model, bank, plan)
    yield prover.adapters()
    yield prover.prefix()
    try:
        trainable = TrainableModel(model, bank, plan, lambda *_: False)
    except UnsupportedModelError as error:
        yield Finding("gradients", None, str(error))
    else:
        yield gradients(trainable, model, plan.vocab_size)


def _kinds(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Paths with a star in place of each number, each once."""
    starred = (".".join("*" if part.isdecimal() else part for part in path.split(".")) for path in paths)
    return tuple(dict.fromkeys(path or "the whole model" for path in starred))


# -- before a model serves -----------------------------------------------------------------------


def prove_once(manager: SharedModelManager, bank: AdapterBank, trust_remote_code: bool = False) -> None:
    """Lets a model of an untested family serve as its verdict says. That is found in a child process, and proved on the
    model's own weights, when it is first loaded. A tested family is checked only with a version of MLX or mlx-lm that
    was not tried.

    Raises:
        UnsupportedModelError: the model does not run, or gives other results in a batch than alone.
    """
    if manager.family.tested and not untried_packages():
        return
    kept = kept_verdict(manager)
    verdict = kept or _in_child(manager.source, trust_remote_code)
    if verdict is not None:
        _obey(verdict, manager)
    if kept is None:
        prove(manager, bank)
        agrees = manager.adapter_layout.linears or (verdict is not None and verdict.of("adapters").problem)
        if verdict is not None and agrees:  # else the model's own weights would not be asked again
            _keep(manager, replace(verdict, compatible=manager.plan.compatible))


def _obey(verdict: ModelVerdict, manager: SharedModelManager) -> None:
    if problem := verdict.of("batch").problem:
        raise UnsupportedModelError(f"{manager.card.name} ({verdict.family}) cannot be served: {problem}")
    if verdict.compatible:
        without = " and without a prefix cache" if manager.plan.layout.opaque else ""
        _log.warning("%s is served row by row%s, which is slow with many requests", manager.card.name, without)
        manager.plan = prepare(manager.model, compatible=True)
    if problem := verdict.of("adapters").problem:
        _log.warning("%s is served without adapters: %s", manager.card.name, problem)
        manager.refuse_adapters(f"LoRA on a {verdict.family} model")


def _in_child(source: Path, trust_remote_code: bool) -> ModelVerdict | None:
    """The verdict of a child process. None: it could not be found, such as for a model that does not run with fewer
    layers.

    Raises:
        UnsupportedModelError: the model ends the process, row by row too.
    """
    command = [sys.executable, "-m", "mlx_parallm", "check", str(source), "--json"]
    command += ["--trust-remote-code"] if trust_remote_code else []
    for flags in ([], ["--row-by-row"]):
        try:
            done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning("the check of %s took more than %.0f s; it is repeated in this process", source, _TIMEOUT_S)
            return None
        if done.returncode >= 0 or done.returncode == -signal.SIGKILL:
            break
    else:
        raise UnsupportedModelError(
            f"the code of this model ends the process ({signal.Signals(-done.returncode).name}): `mlx_parallm check "
            f"{source}` shows it"
        )
    try:
        return ModelVerdict.of_json(json.loads(done.stdout))
    except ValueError:  # it ended before it had a verdict; the whole model is checked in this process
        _log.info("the child process has no verdict, so the whole model is checked in this one: %s", done.stderr)
        return None


# -- kept verdicts -------------------------------------------------------------------------------


def kept_verdict(manager: SharedModelManager) -> ModelVerdict | None:
    """The verdict that was found when the model was loaded before, or None."""
    try:
        return ModelVerdict.of_json(json.loads(_file_of(manager).read_bytes()))
    except (OSError, *MALFORMED):
        return None


def _keep(manager: SharedModelManager, verdict: ModelVerdict) -> None:
    file = _file_of(manager)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(asdict(verdict), indent=2).encode())
    except OSError as error:
        _log.info(
            "%s is checked again at the next start, because %s cannot be written: %s", verdict.family, file, error
        )


def _file_of(manager: SharedModelManager) -> Path:
    versions = [__version__, *(metadata.version(name) for name in ("mlx", "mlx-lm"))]
    config = manager.source / "config.json"
    known = [config.read_text() if config.is_file() else manager.card.name, str(on_cpu()), *versions]
    name = hashlib.sha256("\0".join(known).encode()).hexdigest()[:32]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "mlx_parallm" / "checks" / f"{name}.json"
