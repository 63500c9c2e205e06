"""atroposlib 0.4, unmodified: its clients for vLLM and SGLang, and its managed server in two turns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from clients.running import script
from main_job.serving import Server

from mlx_parallm.cli.main import main

pytestmark = pytest.mark.timeout(900)

MASKED, NO_LOGPROB = -100, 1.0
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def told(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("atropos") / "tokenizer"
    assert main(["tokenizer", "save", str(folder)]) == 0
    asked = {"tokenizer": str(folder), "question": QUESTION, "max_tokens": 12}
    return script("with_atropos_servers.py", server.url, asked, ("vllm", "sglang", "scored", "several"))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_turns_are_one_sequence_with_the_logprobs_of_what_was_drawn(
    server: Server, told: dict[str, Any], kind: str
) -> None:
    [sequence] = told[kind]
    tokens, masks, logprobs = sequence["tokens"], sequence["masks"], sequence["logprobs"]
    assert len(tokens) == len(masks) == len(logprobs)
    drawn = [place for place, mask in enumerate(masks) if mask != MASKED]
    assert [masks[place] for place in drawn] == [tokens[place] for place in drawn]
    assert [logprobs[place] for place in range(len(tokens)) if place not in drawn] == [NO_LOGPROB] * (
        len(tokens) - len(drawn)
    )
    gaps = sum(later - earlier > 1 for earlier, later in pairwise(drawn))
    assert gaps == 1, "two answers, with the second question between them"
    scored = server.post("/v1/completions", prompt=tokens, max_tokens=1, prompt_logprobs=0)["choices"][0]
    for place in drawn:
        [expected] = scored["prompt_logprobs"][place].values()
        assert logprobs[place] == pytest.approx(expected["logprob"], abs=1e-3)


def test_prompts_are_scored(told: dict[str, Any]) -> None:
    scored = told["scored"]
    ids, logprobs = scored["prompt_topk_token_ids"], scored["prompt_topk_logprobs"]
    assert (ids[0], logprobs[0]) == ([], [])
    assert [each[0] for each in ids[1:]] == scored["prompt_tokens"][1:], "the prompt's own token comes first"
    assert [len(each) for each in ids[1:]] == [len(each) for each in logprobs[1:]]


def test_several_answers(told: dict[str, Any]) -> None:
    several = told["several"]
    assert len(several["tokens"]) == len(several["logprobs"]) == 4
    assert set(several["reasons"]) <= {"stop", "length"}
    assert [len(each) for each in several["tokens"]] == [len(each) for each in several["logprobs"]]
