"""Reinforcement learning with Tinker's SDK: groups of samples, rewards, and importance sampling.

    uv run --extra tinker python examples/protocols/tinker/rl.py [URL]

The advantage of a sample is its reward minus the mean of its group.
"""

import os
import re
import sys
from pathlib import Path
from statistics import fmean

os.environ.setdefault("TINKER_API_KEY", "tml-none")
os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from chats import TASKS, bundled_tokenizer, prompt_ids
from tinker import types
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[1]))
from serving import served, show

UPDATES, TASKS_A_STEP, GROUP = 8, 4, 6
LEARNING_RATE = 1e-3
SAMPLING = types.SamplingParams(max_tokens=12, temperature=1.0)


def reward(text: str, right: str) -> float:
    """The right word's share of the answer, 0 if the opposite is in it."""
    said = re.findall("[a-z]+", text.lower())
    wrong = {"positive": "negative", "negative": "positive"}[right]
    return 0.0 if wrong in said else said.count(right) / max(len(said), 1)


def datum(prompt: list[int], drawn: types.SampledSequence, advantage: float) -> types.Datum:
    """A sample, whose prompt adds nothing to the loss."""
    before, tokens = [0] * (len(prompt) - 1), list(drawn.tokens)
    length = len(before) + len(tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(prompt + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=before + tokens, dtype="int64", shape=[length]),
            "logprobs": types.TensorData(data=before + list(drawn.logprobs), dtype="float32", shape=[length]),
            "advantages": types.TensorData(data=before + [advantage] * len(tokens), dtype="float32", shape=[length]),
        },
    )


def rollouts(
    sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase, tasks: list[dict]
) -> tuple[list[types.Datum], float]:
    """The samples of some tasks as training data, and their mean reward."""
    prompts = [prompt_ids(tokenizer, task["prompt"] + " Answer with one word.") for task in tasks]
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, SAMPLING) for prompt in prompts]
    data, means = [], []
    for prompt, task, future in zip(prompts, tasks, asked, strict=True):
        group = future.result().sequences
        rewards = [reward(tokenizer.decode(drawn.tokens, skip_special_tokens=True), task["answer"]) for drawn in group]
        means.append(fmean(rewards))
        data += [datum(prompt, drawn, score - means[-1]) for drawn, score in zip(group, rewards, strict=True)]
    return data, fmean(means)


def main() -> None:
    with served() as url:
        tokenizer = bundled_tokenizer()
        service = tinker.ServiceClient(base_url=url)
        training = service.create_lora_training_client(base_model="base-model", rank=8).result()
        for step in range(1, UPDATES + 1):
            tasks = [TASKS[(step * TASKS_A_STEP + number) % len(TASKS)] for number in range(TASKS_A_STEP)]
            data, mean = rollouts(training.save_weights_and_get_sampling_client().result(), tokenizer, tasks)
            scored = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            scored.result()
            stepped.result()
            show(step, mean)


if __name__ == "__main__":
    main()
