# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl==1.16.0", "torch==2.15.0", "transformers==5.24.0", "peft==0.21.2", "datasets==5.2.0", "accelerate==1.15.0",
# ]
# ///
"""TRL's side of `studies/beside_trl.py`: one cell.

    PYTHONPATH=. uv run --script benchmarks/lib/programs/trl_side.py ORDER.json

TRL's own trainers run unchanged on a CPU in float32; subclasses only note what they compute. The conversation of two
turns is played by TRL's `rollout_func`. An order may be for logits only: see `write_logits`.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

from benchmarks.lib.training.beside_tasks import (
    ADAPTER,
    END,
    GRADIENTS,
    RESULT,
    TASKS,
    Order,
    Said,
    between_turns,
)
from benchmarks.lib.training.learning_tasks import Prompt


class Noted:
    """Notes the loss of each step."""

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        found = super().compute_loss(*arguments, **named)
        self.losses.append(float(found[0] if isinstance(found, tuple) else found))
        return found


class NotedGRPO(Noted, GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self.logprobs = found[0].detach().numpy()
        return found

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.rows = {name: inputs[name].numpy() for name in ("completion_ids", "completion_mask", "prompt_ids")}
        self.rows["prompt_mask"] = inputs["prompt_mask"].numpy()
        return super()._compute_loss(model, inputs)


class NotedDPO(Noted, DPOTrainer):
    pass


class NotedKTO(Noted, KTOTrainer):
    pass


class Watch(TrainerCallback):
    """Notes when each update ended, and the gradients of the first one."""

    def __init__(self, keeps_gradients: bool) -> None:
        self.keeps, self.gradients, self.ended = keeps_gradients, {}, []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began, self.spent = time.perf_counter(), time.process_time()

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        if self.keeps and not self.gradients:
            self.gradients = {
                name: each.grad.numpy().copy() for name, each in model.named_parameters() if each.grad is not None
            }

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds, processor = time.perf_counter() - self.began, time.process_time() - self.spent
        self.ended.append({"seconds": seconds, "processor": processor})


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    if "logits" in order:
        write_logits(**order["logits"])
    else:
        run(Order(**order))


def run(order: Order) -> None:
    """Runs a cell, and writes its results."""
    torch.set_num_threads(order.hyper.threads)
    model = AutoModelForCausalLM.from_pretrained(order.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, order.adapter, is_trainable=True)
    parts = model, AutoTokenizer.from_pretrained(order.model), Watch(order.keeps_gradients)
    rewards = Rewards(order, parts[1])
    trainer = grpo(order, rewards, *parts) if order.loss not in PREFERENCES else preference(order, *parts)
    trainer.losses = []
    trainer.train()
    result = {"updates": updates(trainer.losses, rewards.means, parts[2].ended), "tokens": rewards.tokens}
    if order.given:
        result["rows"] = logprobs_of(trainer)
    folder = Path(order.folder)
    model.save_pretrained(folder / ADAPTER, selected_adapters=["default"])
    if order.keeps_gradients:
        np.savez(folder / GRADIENTS, **parts[2].gradients)
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    (folder / RESULT).write_text(json.dumps(result))


def updates(losses: list[float], rewards: list[float], ended: list[dict[str, float]]) -> list[dict[str, float]]:
    made = [{**times, "loss": loss} for times, loss in zip(ended, losses, strict=True)]
    return [{**update, "reward": reward} for update, reward in zip(made, rewards, strict=True)] if rewards else made


def write_logits(model: str, texts: list[str], tokens: list[int], file: str) -> None:
    """Writes the logits of a sequence of tokens, and the tokens of the texts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    Path(file).with_suffix(".tokens.json").write_text(json.dumps(tokenizer(texts)["input_ids"]))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        np.save(file, loaded(torch.tensor([tokens])).logits[0].numpy())


def common(order: Order, batch: int) -> dict[str, Any]:
    """The arguments that all trainers share."""
    setting = order.hyper
    return {
        "output_dir": str(Path(order.folder) / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "learning_rate": setting.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": setting.beta1,
        "adam_beta2": setting.beta2,
        "adam_epsilon": setting.eps,
        "weight_decay": setting.weight_decay,
        "max_grad_norm": setting.max_grad_norm,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "max_steps": order.updates,
        "seed": order.seed,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


class Rewards:
    """The reward function of a task. `means`: the mean reward of each batch. `tokens`: of all completions."""

    __name__ = "rewards"

    def __init__(self, order: Order, tokenizer: Any) -> None:
        self._task, self._end = TASKS.get(order.task), tokenizer.convert_tokens_to_ids(END)
        self.means: list[float] = []
        self.tokens = 0

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, facts: Any, **columns: Any) -> list[float]:
        found = columns.get("earned")  # from a `rollout_func`
        if found is None:
            said = [Said(text, self._end in ids) for text, ids in zip(completions, completion_ids, strict=True)]
            rows = zip(prompts, facts, said, strict=True)
            found = [self._task.rewarded(Prompt(text, json.loads(known)), [one]) for text, known, one in rows]
        self.tokens += sum(map(len, completion_ids))
        self.means.append(sum(found) / len(found))
        return found


def grpo(order: Order, rewards: Rewards, model: Any, tokenizer: Any, watch: Watch) -> NotedGRPO:
    """The trainer for policy gradients on sampled or given answers."""
    setting, task = order.hyper, TASKS.get(order.task)
    rollout = None
    if order.given:
        prompts = [Prompt(tokenizer.decode(each.prompt_ids)) for each in order.rollouts[:: setting.group]]
        rollout = partial(given, order)
    else:
        prompts = list(islice(task.training(order.seed), setting.prompts * order.updates))
        if has_two_turns(task, prompts[0]):
            rollout = partial(two_turns, task, {each.text: each for each in prompts})
    args = GRPOConfig(
        **common(order, len(order.given) or setting.prompts * setting.group),
        num_generations=setting.group,
        steps_per_generation=1,
        max_completion_length=order.max_tokens,
        temperature=1.0,
        beta=0.0,
        loss_type=order.loss,
        epsilon=setting.clip_low,
        epsilon_high=setting.clip_high,
        scale_rewards=order.scale_rewards,
        shuffle_dataset=False,
    )
    rows = [{"prompt": each.text, "facts": json.dumps(each.metadata)} for each in prompts]
    data = Dataset.from_list(rows)
    return NotedGRPO(
        model,
        rewards,
        args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
        rollout_func=rollout,
    )


def has_two_turns(task: Any, prompt: Prompt) -> bool:
    return task.follow_up(prompt, Said("", ended=True)) is not None


def logprobs_of(trainer: NotedGRPO) -> list[dict[str, Any]]:
    """The last batch: each prompt with its completion, and the trainer's logprobs of it."""
    rows = trainer.rows
    return [
        {
            "prompt_ids": prompt[kept > 0].tolist(),
            "completion_ids": ids[mask > 0].tolist(),
            "logprobs": logprobs[mask > 0].tolist(),
        }
        for prompt, kept, ids, mask, logprobs in zip(
            rows["prompt_ids"],
            rows["prompt_mask"],
            rows["completion_ids"],
            rows["completion_mask"],
            trainer.logprobs,
            strict=True,
        )
    ]


def given(order: Order, _prompts: list[str], _trainer: GRPOTrainer) -> dict[str, Any]:
    """The rollouts of the order, in the form that `rollout_func` returns."""
    rollouts = order.rollouts
    return {
        "prompt_ids": [list(each.prompt_ids) for each in rollouts],
        "completion_ids": [list(each.completion_ids) for each in rollouts],
        "logprobs": None,
        "env_mask": [list(map(int, each.mask)) for each in rollouts],
        "earned": [each.reward for each in rollouts],
    }


def two_turns(task: Any, known: dict[str, Prompt], texts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Plays the conversations of one batch. What the user says between the answers is masked."""
    prompts = [known[text] for text in texts]
    tokenizer = trainer.processing_class
    end = tokenizer.convert_tokens_to_ids(END)

    def asked(ids: list[list[int]]) -> Iterator[tuple[list[int], Said]]:
        found, _ = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
        for each in found:
            yield each, Said(tokenizer.decode(each, skip_special_tokens=True), end in each)

    prompt_ids = [tokenizer(each.text)["input_ids"] for each in prompts]
    firsts = list(asked(prompt_ids))
    between = [
        tokenizer(between_turns(task.follow_up(prompt, said), said.ended))["input_ids"]
        for prompt, (_, said) in zip(prompts, firsts, strict=True)
    ]
    parts = list(zip(prompt_ids, (ids for ids, _ in firsts), between, strict=True))
    seconds = list(asked([prompt + first + turn for prompt, first, turn in parts]))
    both = list(zip(parts, seconds, strict=True))
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [first + turn + second for (_, first, turn), (second, _) in both],
        "logprobs": None,
        "env_mask": [[1] * len(a) + [0] * len(turn) + [1] * len(b) for (_, a, turn), (b, _) in both],
        "earned": [
            task.rewarded(prompt, [first, second])
            for prompt, (_, first), (_, second) in zip(prompts, firsts, seconds, strict=True)
        ],
    }


def preference(order: Order, model: Any, tokenizer: Any, watch: Watch) -> NotedDPO | NotedKTO:
    """The trainer for the rows of the order, in their order."""
    trainer, config, batch = PREFERENCES[order.loss]
    args = config(
        **common(order, getattr(order.hyper, batch)),
        beta=order.hyper.preference_beta,
        max_length=None,
        train_sampling_strategy="sequential",
    )
    data = Dataset.from_list([row for rows in order.batches() for row in rows])
    return trainer(model, None, args, train_dataset=data, processing_class=tokenizer, callbacks=[watch])


PREFERENCES = {"dpo": (NotedDPO, DPOConfig, "pairs"), "kto": (NotedKTO, KTOConfig, "answers")}


if __name__ == "__main__":
    main()
