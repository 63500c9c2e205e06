"""Prepares and runs the cells of `studies/beside_trl.py`: the model as a Hugging Face folder, the adapters that both
sides begin with, the preference data, and both sides' programs."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  before mlx.core: it chooses the BLAS

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.utils import save_config, save_model

from benchmarks.lib.training.beside_tasks import (
    ADAPTER,
    END,
    GRADIENTS,
    RESULT,
    TASKS,
    Order,
    Preference,
    Setting,
    Sums,
    preferences,
)
from mlx_parallm.adapters.files import read_adapter
from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.adapters.weights import AdapterWeights, LoRAPair, lora_scale
from mlx_parallm.config import ModelConfig
from mlx_parallm.model.bundled import load_bundled
from mlx_parallm.model.layout import adapter_layout
from mlx_parallm.train.policy import new_factors

OURS, TRL = "ours", "TRL"
SIDES = (OURS, TRL)
CHANGED: Mapping[str, Mapping[str, Any]] = {
    "ours without max_kl_step": {"max_kl_step": None},
    "ours with TRL's steps": {"max_kl_step": None, "whole_steps": True},
}
"""Our side with other steps: fields of its orders."""
ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "benchmarks" / "lib" / "programs"
LIMIT_S = 1800
TRAINED, HELD_OUT = slice(0, 16), slice(16, None)
"""Adjectives of the preference data."""
HELD_OUT_PAIRS = 48
CHECKED_PROMPTS = 8
SFT_UPDATES, SFT_EXAMPLES, SFT_RATE = 4, 16, 1e-3
DPO, KTO = "dpo", "kto"


class CellError(RuntimeError):
    """A side's program has failed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The results of one cell. `updates`: for each, the `seconds` since the first began, those of the `processor` that
    the process had, and the `reward` or the `loss`. The processor's seconds hardly depend on what else is running."""

    side: str
    task: str
    seed: int
    learning_rate: float
    updates: list[dict[str, Any]]
    peak_mb: float
    tokens: int = 0
    accuracy: float | None = None
    margin: float | None = None

    @property
    def name(self) -> str:
        """The task, the side, and the learning rate if it is another one than usual."""
        usual = self.learning_rate == Setting().learning_rate
        return f"{self.task}, {self.side}" + ("" if usual else f", learning rate {self.learning_rate:g}")

    @property
    def processor_s(self) -> float:
        """Processor time of an update. The first one, which also warms up, does not count."""
        ends = [update["processor"] for update in self.updates]
        return float((ends[-1] - ends[0]) / (len(ends) - 1))


class Bench:
    """A folder with all that the cells need. Everything in it is made once."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        self.folder, self.setting = folder, setting
        folder.mkdir(parents=True, exist_ok=True)
        self.model, self.tokenizer, self._config = load_bundled(dequantize=True)
        self.layout = adapter_layout(self.model)
        self._write_model()

    # -- what both sides begin with --------------------------------------------------------------

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def _write_model(self) -> None:
        """The bundled model in float32, with its tokenizer, as Transformers reads it."""
        if (self.model_folder / "tokenizer_config.json").exists():
            return
        save_model(self.model_folder, self.model)
        config = {key: value for key, value in self._config.items() if key != "quantization"}
        save_config(config | {"architectures": ["LlamaForCausalLM"]}, self.model_folder / "config.json")
        self.tokenizer.save_pretrained(self.model_folder)

    def adapter(self, seed: int) -> Path:
        """A new adapter of this seed, which changes nothing yet."""
        folder = self.folder / f"adapter-{seed}"
        if not folder.exists():
            folder.mkdir()
            lora = ModelConfig(lora_rank=self.setting.rank, lora_alpha=self.setting.alpha)
            params, scale = new_factors(self.layout, lora, seed), lora_scale(self.setting.alpha, self.setting.rank)
            pairs = {path: LoRAPair(np.array(p["a"]), np.array(p["b"]), scale) for path, p in params.items()}
            write_peft(folder, AdapterWeights(pairs), self.layout, str(self.model_folder))
        return folder

    def taught_sums(self) -> Path:
        """An adapter that has seen examples of sums, made by our side. Both sides begin with it."""
        folder = self.folder / "sums-taught"
        if not folder.exists():
            examples = Sums().examples(seed=1000)
            batches = [
                [{"prompt": text, "completion": answer + END} for text, answer in islice(examples, SFT_EXAMPLES)]
                for _ in range(SFT_UPDATES)
            ]
            order = self._order("cross_entropy", self.adapter(0), "teach", updates=SFT_UPDATES)
            setting = {**order.setting, "learning_rate": SFT_RATE}
            _, taught = self.run(OURS, replace(order, setting=setting, data=str(self._data("sums", batches))))
            shutil.copytree(taught / ADAPTER, folder)
        return folder

    def preference_data(self, loss: str, seed: int, updates: int) -> Path:
        """The rows of each update: pairs for DPO; for KTO single answers, half of them right ones.

        No question comes twice. The questions of each update of KTO are in falling order of their tokens, because both
        sides then estimate its z0 from the same mismatched answers.
        """
        each = self.setting.pairs if loss == DPO else self.setting.answers
        pairs = preferences(TRAINED, seed, each * updates)
        batches = [pairs[at : at + each] for at in range(0, len(pairs), each)]
        if loss == DPO:
            rows = [[_pair_row(pair) for pair in batch] for batch in batches]
        else:
            rows = [[_answer_row(pair, at % 2 == 0) for at, pair in enumerate(self._falling(b))] for b in batches]
        return self._data(f"{loss}-{seed}", rows)

    def _falling(self, pairs: Sequence[Preference]) -> list[Preference]:
        return sorted(pairs, key=lambda pair: tuple(self.tokenizer.encode(pair.prompt)), reverse=True)

    def _data(self, name: str, batches: Sequence[Any]) -> Path:
        file = self.folder / f"data-{name}.json"
        file.write_text(json.dumps(batches))
        return file

    # -- orders ----------------------------------------------------------------------------------

    def _order(self, loss: str, adapter: Path, name: str, **fields: Any) -> Order:
        setting = {field: getattr(self.setting, field) for field in Setting.__dataclass_fields__}
        folder = self.folder / f"{name}-{self.setting.learning_rate:g}"
        return Order(loss, str(self.model_folder), str(adapter), str(folder), setting=setting, **fields)

    def grpo(self, task: str, seed: int, updates: int, max_tokens: int) -> Order:
        """Policy gradients on a task."""
        adapter = self.taught_sums() if task == Sums.name else self.adapter(seed)
        name = f"{task.replace(' ', '-')}-{seed}"
        return self._order("dapo", adapter, name, task=task, seed=seed, updates=updates, max_tokens=max_tokens)

    def preference(self, loss: str, seed: int, updates: int, keeps_gradients: bool = False) -> Order:
        """DPO or KTO on the preference data."""
        data = self.preference_data(loss, seed, updates)
        return self._order(
            loss,
            self.adapter(seed),
            f"{loss}-{seed}",
            seed=seed,
            updates=updates,
            data=str(data),
            keeps_gradients=keeps_gradients,
        )

    def sampled(self, task: str) -> list[dict[str, Any]]:
        """Answers that our side samples for one update of a task, with random rewards. The adapter has learnt something
        before, so that all its factors have gradients."""
        order = self.grpo(task, 0, 1, TASKS[task].max_tokens)
        result, _ = self.run(OURS, replace(order, adapter=str(self.taught_sums()), keeps_gradients=True))
        dice = random.Random(0)
        return [{**each, "reward": dice.random()} for each in result["rollouts"]]

    def step(self, loss: str, rollouts: Sequence[Mapping[str, Any]], max_tokens: int, scale: str) -> Order:
        """One update from given answers. Gradients are not clipped."""
        order = self._order(loss, self.taught_sums(), f"step-{loss}-{scale}", given=rollouts)
        setting = {**order.setting, "max_grad_norm": 1e30}
        order = replace(order, setting=setting, max_tokens=max_tokens, max_kl_step=None)
        return replace(order, scale_rewards=scale, keeps_gradients=True)

    # -- running ---------------------------------------------------------------------------------

    def run(self, side: str, order: Order) -> tuple[dict[str, Any], Path]:
        """Runs a cell in a process of its own. Returns its result, and its folder.

        Raises:
            CellError: it has failed.
        """
        folder = Path(f"{order.folder}-{side.replace(' ', '-')}")
        order = replace(order, **CHANGED.get(side, {}))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        replace(order, folder=str(folder)).write(folder / "order.json")
        _call(side, folder / "order.json", order.hyper.threads)
        result: dict[str, Any] = json.loads((folder / RESULT).read_text())
        return result, folder

    def run_both(self, order: Order, together: bool, sides: Sequence[str] = SIDES) -> list[tuple[dict[str, Any], Path]]:
        """Runs the cell of each of these sides, at the same time or one after the other."""
        with ThreadPoolExecutor(len(SIDES) if together else 1) as threads:
            return list(threads.map(lambda side: self.run(side, order), sides))

    def logits_apart(self) -> float:
        """Largest difference of a logit between the model here and the one that PyTorch has read.

        Raises:
            CellError: the tokenizer that Transformers has read makes other tokens of a prompt of the tasks.
        """
        texts = [prompt.text for task in TASKS.values() for prompt in islice(task.training(0), CHECKED_PROMPTS)]
        tokens = self.tokenizer.encode("".join(texts[:2]))
        file, order = self.folder / "logits.npy", self.folder / "logits.json"
        asked = {"model": str(self.model_folder), "texts": texts, "tokens": tokens, "file": str(file)}
        order.write_text(json.dumps({"logits": asked}))
        _call(TRL, order, self.setting.threads)
        if json.loads(file.with_suffix(".tokens.json").read_text()) != [self.tokenizer.encode(text) for text in texts]:
            raise CellError("the tokenizer that Transformers has read makes other tokens")
        ours = np.array(self.model(mx.array([tokens]))[0].astype(mx.float32))
        return float(np.abs(ours - np.load(file)).max())

    # -- held-out preferences --------------------------------------------------------------------

    def held_out(self, adapter: Path) -> tuple[float, float]:
        """Of held-out questions: the share whose right answer has become more likely than the wrong one, relative to
        the model without the adapter, and the mean of this difference in nats."""
        pairs = preferences(HELD_OUT, 0, HELD_OUT_PAIRS)
        plain = [self._preferred(pair) for pair in pairs]
        self._merge(adapter, 1.0)
        learnt = [self._preferred(pair) for pair in pairs]
        self._merge(adapter, -1.0)
        margins = [after - before for before, after in zip(plain, learnt, strict=True)]
        return sum(margin > 0 for margin in margins) / len(margins), float(np.mean(margins))

    def _merge(self, adapter: Path, times: float) -> None:
        """Adds the adapter to the weights, or takes it out again."""
        modules = dict(self.model.named_modules())
        for path, pair in read_adapter(adapter, self.layout, self.setting.rank).weights.pairs.items():
            change = mx.array(pair.a) @ mx.array(pair.b)
            modules[path].weight = modules[path].weight + times * pair.scale * change.T
        mx.eval(self.model.parameters())

    def _preferred(self, pair: Preference) -> float:
        """Logprob of the right answer minus that of the wrong one."""
        return self._logprob(pair.prompt, pair.chosen) - self._logprob(pair.prompt, pair.rejected)

    def _logprob(self, prompt: str, answer: str) -> float:
        asked, said = self.tokenizer.encode(prompt), self.tokenizer.encode(answer)
        logits = self.model(mx.array([[*asked, *said[:-1]]]))[0, len(asked) - 1 :].astype(mx.float32)
        known = logits - mx.logsumexp(logits, -1, keepdims=True)
        return float(known[mx.arange(len(said)), mx.array(said)].sum().item())


def gradients_apart(ours: Path, theirs: Path, ratio: float = 1.0) -> float:
    """Norm of the difference of our gradients divided by `ratio` and TRL's, relative to TRL's. PEFT has the transposed
    factors."""
    mine, other = np.load(ours / GRADIENTS), np.load(theirs / GRADIENTS)
    named = {_plain(name): other[name].T for name in other.files}
    if set(mine.files) != named.keys():
        raise CellError(f"gradients of other factors: {sorted(set(mine.files) ^ named.keys())[:4]}")
    apart = sum(float(np.square(mine[name] / ratio - named[name], dtype=np.float64).sum()) for name in mine.files)
    return float(np.sqrt(apart / sum(float(np.square(each, dtype=np.float64).sum()) for each in named.values())))


def _plain(name: str) -> str:
    """`base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight` → `model.layers.0.mlp.up_proj.lora_a`"""
    path, _, factor = name.removeprefix("base_model.model.").removesuffix(".default.weight").rpartition(".")
    return f"{path}.{factor.lower()}"


def adapters_apart(bench: Bench, start: Path, ours: Path, theirs: Path) -> float:
    """Norm of the difference of what two adapters have learnt since `start`, relative to TRL's."""
    rank = bench.setting.rank
    first, mine, other = (read_adapter(each, bench.layout, rank).weights for each in (start, ours, theirs))
    apart = moved = 0.0
    for path in other.pairs:
        for name in ("a", "b"):
            before, one, two = (np.asarray(getattr(w.pairs[path], name), np.float64) for w in (first, mine, other))
            apart, moved = apart + np.square(one - two).sum(), moved + np.square(two - before).sum()
    return float(np.sqrt(apart / moved))


def _pair_row(pair: Preference) -> dict[str, Any]:
    return {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}


def _answer_row(pair: Preference, right: bool) -> dict[str, Any]:
    return {"prompt": pair.prompt, "completion": pair.chosen if right else pair.rejected, "label": right}


def environment(threads: int) -> dict[str, str]:
    """The variables of a side's program."""
    variables = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return os.environ | variables | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def _call(side: str, order: Path, threads: int) -> None:
    """Runs a side's program; TRL's in an environment of its own, which uv makes and keeps."""
    if side != TRL:
        command = [sys.executable, "-m", "benchmarks.lib.programs.our_side"]
    else:
        command = ["uv", "--quiet", "run", "--python", sys.executable, "--script", str(PROGRAMS / "trl_side.py")]
    with order.with_suffix(".log").open("w") as log:
        done = subprocess.run(
            [*command, str(order)], cwd=ROOT, env=environment(threads), stdout=log, stderr=log, timeout=LIMIT_S
        )
    if done.returncode:
        tail = order.with_suffix(".log").read_text()[-3000:]
        raise CellError(f"{side}'s {order.parent.name} ended with {done.returncode}:\n{tail}")
