"""The real server on two ranks, on one machine: it says what one rank says, and ends cleanly when a rank is lost."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import openai
import pytest
from lora import layout_of, random_adapter
from main_job.ranks import flags_of, launched, started
from main_job.serving import Server, in_thread

from mlx_parallm.adapters.formats import write_peft
from mlx_parallm.extras.ranks.tensor_parallel import SPLIT_FAMILIES
from mlx_parallm.model.bundled import load_bundled

pytestmark = pytest.mark.slow

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3
"""204 tokens: three whole blocks, and a part of one."""
Answers = list[tuple[str, list[float]]]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return flags_of("llama", tmp_path_factory.mktemp("ranks"))


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


@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_two_ranks_say_what_one_says_and_end_together(family: str, tmp_path: Path) -> None:
    flags = flags_of(family, tmp_path)
    with in_thread(*flags) as server:
        expected = answers(server)
    with launched(flags) as server:
        got = answers(server)
    for (text, logprobs), (want, wanted) in zip(got, expected, strict=True):
        assert text == want
        assert logprobs == pytest.approx(wanted, abs=1e-4)


def tokens_with_adapters(server: Server) -> list[list[tuple[str, float]]]:
    """Greedy tokens of the base and both adapters at once, and again, with cached prefixes."""

    def ask_for_tokens(model: str) -> list[tuple[str, float]]:
        body = {"model": model, "prompt": PROMPT * 2, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        [choice] = server.post("/v1/completions", logprobs=0, **body)["choices"]
        return list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True))

    with ThreadPoolExecutor(3) as pool:
        return [each for _ in range(2) for each in pool.map(ask_for_tokens, ("base", "one", "two"))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bundled_model_says_the_same_on_ranks(ranks: int, tmp_path: Path) -> None:
    """Two ranks get heads of zeros. Where tokens part, which they do at a tie only, what follows is not compared."""
    layout = layout_of(load_bundled(dequantize=False)[0])
    for seed, name in enumerate(("one", "two"), start=1):
        write_peft(tmp_path / "adapters" / name, random_adapter(layout, seed, rank=2 * seed), layout, None)
    flags = ["--adapter-dir", str(tmp_path / "adapters"), "--log-level", "warning"]
    with in_thread(*flags) as server:
        expected = tokens_with_adapters(server)
    with started(flags, tmp_path, ranks) as (server, _):
        got = tokens_with_adapters(server)
        cached = server.http.get("/metrics").text
    apart = [
        abs(mine - its)
        for one, other in zip(got, expected, strict=True)
        for (_, mine), (_, its) in takewhile(lambda both: both[0][0] == both[1][0], zip(one, other, strict=True))
    ]
    print(f"{ranks} ranks: {max(apart):.1e} apart at {len(apart)} tokens of {sum(map(len, got))}")
    assert len(apart) > 40
    assert max(apart) < 1e-4
    [hits] = [line for line in cached.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert float(hits.split()[-1]) > 0


def test_a_signal_to_rank_0_ends_both_without_an_error(flags: list[str], tmp_path: Path) -> None:
    with started(flags, tmp_path) as (server, (leader, follower)):
        ask(server, "one")
        leader.send_signal(signal.SIGTERM)
        assert (leader.wait(60), follower.wait(60)) == (0, 0)


@pytest.mark.parametrize(("how", "within_s"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 10)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_when_a_rank_is_lost_requests_fail_and_rank_0_ends(
    flags: list[str], tmp_path: Path, ranks: int, how: signal.Signals, within_s: float
) -> None:
    with started(flags, tmp_path, ranks) as (server, (leader, *_, last)):
        events = iter(server.stream("two", max_tokens=3000))
        next(events)
        last.send_signal(how)
        lost = time.monotonic()
        with pytest.raises(openai.APIError, match=f"rank {ranks - 1} is lost"):
            list(events)
        print(f"{ranks} ranks, {how.name}: an error after {time.monotonic() - lost:.2f} s")
        assert time.monotonic() - lost < within_s
        assert leader.wait(60) == 1
