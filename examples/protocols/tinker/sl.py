"""Supervised learning with Tinker's SDK: the model imitates answers of one word.

    uv run --extra tinker python examples/protocols/tinker/sl.py [URL]

The answers to the last tasks are held out, and asked for before and after.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TINKER_API_KEY", "tml-none")
os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker
from chats import TASKS, bundled_tokenizer, prompt_ids
from tinker import types
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[1]))
from serving import served

STEPS, BATCH, HELD_OUT = 8, 6, 8
LEARNING_RATE = 5e-4


def datum(tokenizer: PreTrainedTokenizerBase, task: dict) -> types.Datum:
    """A conversation, whose loss is that of the answer alone."""
    prompt = prompt_ids(tokenizer, task["prompt"])
    answer = tokenizer.encode(task["answer"] + "<|im_end|>")
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(weights)]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        },
    )


def right_answers(sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase, tasks: list[dict]) -> int:
    """How many of the tasks the model answers with the one right word."""
    params = types.SamplingParams(max_tokens=8, temperature=0)
    prompts = [types.ModelInput.from_ints(prompt_ids(tokenizer, task["prompt"])) for task in tasks]
    drawn = [sampler.sample(prompt, 1, params) for prompt in prompts]
    texts = [tokenizer.decode(each.result().sequences[0].tokens, skip_special_tokens=True) for each in drawn]
    return sum(text == task["answer"] for text, task in zip(texts, tasks, strict=True))


def main() -> None:
    with served() as url:
        tokenizer = bundled_tokenizer()
        service = tinker.ServiceClient(base_url=url)
        training = service.create_lora_training_client(base_model="base-model", rank=8).result()
        taught, held_out = TASKS[:-HELD_OUT], TASKS[-HELD_OUT:]
        before = right_answers(training.save_weights_and_get_sampling_client().result(), tokenizer, held_out)
        for step in range(STEPS):
            batch = [datum(tokenizer, taught[(step * BATCH + number) % len(taught)]) for number in range(BATCH)]
            scored = training.forward_backward(batch, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            tokens = sum(sum(each.loss_fn_inputs["weights"].data) for each in batch)
            loss = scored.result().metrics["loss:sum"] / tokens
            stepped.result()
            print(f"update {step + 1}: loss {loss:.3f} {'█' * round(10 * loss)}", flush=True)
        after = right_answers(training.save_weights_and_get_sampling_client().result(), tokenizer, held_out)
        print(f"right answers to {HELD_OUT} held-out questions: {before} before, {after} after")


if __name__ == "__main__":
    main()
