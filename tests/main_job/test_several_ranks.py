"""The real server on two ranks, on one machine: it says what one rank says, and ends cleanly when a rank is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from lora import layout_of, random_adapter
from main_job.serving import COMMAND, Server, free_port, in_thread
from tiny import save_tiny

from mlx_parallm.adapters.files.write import write_peft
from mlx_parallm.model.sharding import SPLIT_FAMILIES

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3
"""204 tokens: three whole blocks, and a part of one."""
HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
"""Two ranks get four heads of keys and values, one of which is zeros."""
Answers = list[tuple[str, list[float]]]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags_of("llama", tmp_path_factory.mktemp("ranks"))


def flags_of(family: str, folder: Path) -> list[str]:
    """A model, and two adapters of different ranks on all linears."""
    layout = layout_of(save_tiny(family, folder / "model", **HEADS))
    for seed, name in enumerate(("one", "two"), start=1):
        write_peft(folder / "adapters" / name, random_adapter(layout, seed, rank=2 * seed), layout, None)
    return ["--model-path", str(folder / "model"), "--adapter-dir", str(folder / "adapters"), "--log-level", "warning"]


def ask(server: Server, model: str, prompt: str = PROMPT) -> tuple[str, list[float]]:
    """A greedy answer with the logprobs of its tokens and of the prompt's."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    [choice] = server.post("/v1/completions", **body)["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def answers(server: Server) -> Answers:
    """Of the base and both adapters at once, and again, with cached prefixes, beside shorter prompts."""
    asked = [(name, PROMPT[start:]) for start in (0, 0, 90) for name in ("base", "one", "two")]
    with ThreadPoolExecutor(len(asked)) as pool:
        first = list(pool.map(lambda each: ask(server, *each), asked))
        return first + list(pool.map(lambda each: ask(server, *each), asked))


@contextmanager
def two_ranks(flags: list[str], folder: Path) -> Iterator[tuple[Server, subprocess.Popen[str], subprocess.Popen[str]]]:
    """Rank 0 and rank 1, started as `mlx.launch` starts them."""
    hosts, port = folder / "hosts.json", free_port()
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    ranks = [
        subprocess.Popen(
            [*COMMAND, "--port", str(port), *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        with serving(ranks[0], port) as server:
            yield server, ranks[0], ranks[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@contextmanager
def serving(process: subprocess.Popen[str], port: int) -> Iterator[Server]:
    """The server that the process starts, from its banner on."""
    killer = threading.Timer(120, process.kill)
    killer.start()
    assert process.stderr is not None
    ready = any("base URL" in line for line in process.stderr)
    killer.cancel()
    assert ready, f"the server ended with {process.wait()}"
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=60) as http:
        yield Server(url, http, process)


@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_two_ranks_say_what_one_says_and_end_together(family: str, tmp_path: Path) -> None:
    flags = flags_of(family, tmp_path)
    with in_thread(*flags) as server:
        expected = answers(server)
    port = free_port()
    launcher = Path(sys.executable).with_name("mlx.launch")
    command = [launcher, "-n", "2", "--backend", "ring", "--starting-port", str(free_port()), "--"]
    process = subprocess.Popen(
        [*command, *COMMAND, "--port", str(port), *flags], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        with serving(process, port) as server:
            got = answers(server)
    finally:
        process.terminate()
        process.communicate()
    for (text, logprobs), (want, wanted) in zip(got, expected, strict=True):
        assert text == want
        assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_signal_to_rank_0_ends_both_without_an_error(flags: list[str], tmp_path: Path) -> None:
    with two_ranks(flags, tmp_path) as (server, leader, follower):
        ask(server, "one")
        leader.send_signal(signal.SIGTERM)
        assert (leader.wait(60), follower.wait(60)) == (0, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_a_rank_is_lost_requests_fail_and_rank_0_ends(
    flags: list[str], tmp_path: Path, how: signal.Signals
) -> None:
    with two_ranks(flags, tmp_path) as (server, leader, follower):
        events = iter(server.stream("two", max_tokens=3000))
        next(events)
        follower.send_signal(how)
        with pytest.raises(openai.APIError, match="engine is not running"):
            list(events)
        assert leader.wait(60) == 1


def test_what_does_not_work_with_several_ranks_is_refused_by_name(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the server ended with 2"):  # noqa: SIM117
        with two_ranks([*flags, "--kv-bits", "8"], tmp_path):
            pass
