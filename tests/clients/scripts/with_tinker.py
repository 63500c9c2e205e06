"""A Tinker client, unmodified: `python with_tinker.py URL MODEL PART …` prints what each part has found, as one line of
JSON. The environment decides which release of the SDK it is.

The tokens are numbers that any vocabulary has. Nothing is tokenised, so no tokenizer is loaded.
"""

import json
import os
import signal
import sys
import threading
import time

os.environ.setdefault("TINKER_API_KEY", "tml-none")
os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
from tinker import types

URL, MODEL, *PARTS = sys.argv[1:]
PROMPT, ANSWER, OTHER = [100, 101, 102, 103], [140, 141, 142, 143, 144], [150, 151]


def service():
    return tinker.ServiceClient(base_url=URL)


def model(client, rank=4, seed=1, **layers):
    made = client.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed, **layers)
    return made.result() if hasattr(made, "result") else made


def floats(values):
    return types.TensorData(data=[float(value) for value in values], dtype="float32", shape=[len(values)])


def ints(values):
    return types.TensorData(data=list(values), dtype="int64", shape=[len(values)])


def taught(prompt, answer):
    tokens = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": ints(tokens[1:]), "weights": floats(weights)},
    )


def drawn(sequence, advantage):
    before, tokens = len(PROMPT) - 1, list(sequence.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints([*PROMPT, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": ints([0] * before + tokens),
            "logprobs": floats([0.0] * before + list(sequence.logprobs)),
            "advantages": floats([0.0] * before + [advantage] * len(tokens)),
        },
    )


def update(training, data, loss, rate):
    scored = training.forward_backward(data, loss)
    stepped = training.optim_step(types.AdamParams(learning_rate=rate))
    value = scored.result().metrics["loss:sum"]
    stepped.result()
    return value


def sampler_of(training):
    made = training.save_weights_and_get_sampling_client()
    return made.result() if hasattr(made, "result") else made


def sample(sampler, count=1, **params):
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(**{"max_tokens": 5, **params})
    return sampler.sample(prompt=prompt, num_samples=count, sampling_params=params)


def supervised():
    """A run that imitates lowers its loss. Saved and loaded, it goes on as if nothing had happened."""
    client = service()
    training = model(client)
    losses = [update(training, [taught(PROMPT, ANSWER)], "cross_entropy", 2e-3) for _ in range(8)]
    path = training.save_state("taught").result().path
    again = client.create_training_client_from_state_with_optimizer(path)
    again = again.result() if hasattr(again, "result") else again
    ahead = [update(each, [taught(PROMPT, ANSWER)], "cross_entropy", 1e-3) for each in (training, again)]
    training.load_state(path).result()
    info = training.get_info()
    return {"losses": losses, "ahead": ahead, "path": path, "rank": info.lora_rank}


def agree():
    """Logprobs that sampling, compute_logprobs, forward and forward_backward give to the same tokens."""
    training = model(service())
    update(training, [taught(PROMPT, ANSWER)], "cross_entropy", 1e-2)
    sampler = sampler_of(training)
    (sequence,) = sample(sampler, seed=5).result().sequences
    datum = taught(PROMPT, list(sequence.tokens))
    forward = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    backward = training.forward_backward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    whole = types.ModelInput.from_ints([*PROMPT, *sequence.tokens])
    computed = sampler.compute_logprobs(whole).result()
    at = len(PROMPT) - 1
    return {
        "sampled": list(sequence.logprobs),
        "forward": list(forward[at:]),
        "backward": list(backward[at:]),
        "computed": computed[len(PROMPT) :],
        "first": computed[0],
    }


def reinforced():
    """Importance sampling raises the reward: the share of tokens below 128."""
    training = model(service())
    means = []
    for number in range(12):
        answer = sample(sampler_of(training), 16, seed=100 * number, stop=[]).result()
        rewards = [sum(token < 128 for token in each.tokens) / len(each.tokens) for each in answer.sequences]
        means.append(sum(rewards) / len(rewards))
        data = [drawn(each, r - means[-1]) for each, r in zip(answer.sequences, rewards, strict=True)]
        loss = ("importance_sampling", "ppo", "cispo")[number % 3]
        update(training, data, loss, 1e-2)
    return means


def two():
    """Two clients one after the other, and at the same time."""

    def train(seed, losses):
        training = model(service(), rank=2 * seed, seed=seed)
        data = [taught(PROMPT, ANSWER), taught(OTHER, PROMPT)][:seed]
        losses[seed] = [update(training, data, "cross_entropy", 2e-3) for _ in range(4)]

    alone, together = {}, {}
    for seed in (1, 2):
        train(seed, alone)
    threads = [threading.Thread(target=train, args=(seed, together)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"alone": alone, "together": together}


def many():
    """A thousand futures at once, all of which are waited for."""
    sampler = service().create_sampling_client(base_model=MODEL)
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    started = time.monotonic()
    futures = [sample(sampler, max_tokens=1, seed=number) for number in range(1000)]
    done = sum(len(future.result().sequences) for future in futures)
    return {"done": done, "seconds": time.monotonic() - started}


def killed():
    """Dies in the middle of a step."""
    training = model(service())
    for _ in range(20):
        training.forward_backward([taught(PROMPT * 40, ANSWER * 10)] * 8, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3))
    time.sleep(1)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def plain(value):
    return float(value) if isinstance(value, np.floating) else str(value)


print(json.dumps({part: globals()[part]() for part in PARTS}, default=plain), flush=True)
os._exit(0)  # the SDK's threads are daemons, and its clean-up asks a loop that has ended
