"""An environment of verifiers in two turns, played by vf-eval; the server trains on the traces.

    uv run python examples/protocols/verifiers/train.py [URL]

The episodes of each update are played with the train client of verifiers, which sends and gets tokens. Its eval client,
which chats, plays the same tasks before and after. uv gives vf-eval an environment of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).parents[1]))
from serving import post, served, show

HERE = Path(__file__).resolve().parent
UV = ("uv", "tool", "run", "--python", sys.executable)
VF_EVAL = (*UV, "--from", "verifiers==0.4.0", "--with", "transformers>=5", "--with", "jinja2", "vf-eval")
RENDERER = ("--client.renderer.name", "custom", "--client.renderer.import-path", "chatml.py:ChatMLRenderer")
UPDATES, GROUP = 10, 6


def play(url: str, *client: str) -> list[dict]:
    """The traces of a group of episodes for each task of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        run_vf_eval(url, folder, *client)
        episodes = [json.loads(line) for line in (Path(folder) / "run" / "traces.jsonl").open()]
    traces = [trace for episode in episodes for trace in episode["traces"]]
    if errors := [error for trace in traces for error in trace["errors"]]:
        raise SystemExit(f"vf-eval: {errors[0]['message']}")
    return traces


def run_vf_eval(url: str, folder: str, *client: str) -> None:
    settings = {
        "model": "base-model",
        "num-rollouts": str(GROUP),
        "sampling.max-tokens": "10",
        "sampling.temperature": "1.0",
        "client.base-url": f"{url}/v1",
        "client.api-key-var": "NONE",
        "env.agent.runtime.type": "subprocess",
        "output-dir": folder,
        "run.dir": "run",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    command = [*VF_EVAL, "two_turns", *flags, *client, "--no-push", "--no-rich"]
    variables = {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=HERE, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vf-eval ended with {done.returncode}: {done.stdout}{done.stderr}")


def reward(trace: dict) -> float:
    """The weighted sum of a trace's rewards, from 0 to 1 in this environment."""
    return sum(one["score"] * one["weight"] for one in trace["rewards"].values())


def row(trace: dict) -> dict:
    """One row of tokens: the messages of a trace, each of which has the tokens that it adds to those before it."""
    nodes = trace["nodes"]
    if [node.get("parent") for node in nodes] != [None, *range(len(nodes) - 1)]:
        raise SystemExit("a turn did not begin with the tokens of the one before it")
    logprobs = []
    for node in nodes:
        drawn = iter(node["logprobs"])
        logprobs += [next(drawn) if sampled else None for sampled in node["mask"]]
    return {
        "token_ids": [token for node in nodes for token in node["token_ids"]],
        "mask": [sampled for node in nodes for sampled in node["mask"]],
        "logprobs": logprobs,
        "reward": reward(trace),
        "group_id": trace["task"]["key"],
    }


def main() -> None:
    with served() as url, tempfile.TemporaryDirectory() as folder:
        tokenizer = f"{folder}/tokenizer"
        subprocess.run([sys.executable, "-m", "mlx_parallm", "tokenizer", "save", tokenizer], check=True)
        train_client = ("--client.type", "train", "--client.renderer-model-name", tokenizer, *RENDERER)
        print(f"eval client: reward {fmean(map(reward, play(url))):.3f}")
        for step in range(1, UPDATES + 1):
            traces = play(url, *train_client)
            post(f"{url}/v1/training/update", trajectories=[row(trace) for trace in traces])
            show(step, fmean(map(reward, traces)))
        print(f"eval client: reward {fmean(map(reward, play(url))):.3f}")


if __name__ == "__main__":
    main()
