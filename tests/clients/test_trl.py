"""TRL's own clients of vLLM, as published: every request that they make, except the weights of a whole model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from clients.running import PYTHON, SCRIPTS, UV, printed
from main_job.serving import start, stop

TRL = "trl==1.16.0"
ROOT = Path(__file__).parents[2]
MOST_PROMPT_LOGPROBS = 20
"""TRL asks for 100 by default; a server's default limit is this."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trl")
    printed(*UV, "pip", "install", *PYTHON, "--no-deps", "--target", str(folder / "packages"), TRL, at=ROOT)
    adapter = folder / "adapters" / "policy"
    printed(PYTHON[1], "examples/random_adapter.py", str(adapter), at=ROOT)
    server = start("--allowed-adapter-roots", str(folder / "adapters"), "--max-loras", "6", "--max-lora-rank", "32")
    try:
        script = (*UV, "run", *PYTHON, "--script", str(SCRIPTS / "with_trl.py"), str(folder / "packages"))
        told = printed(*script, server.url, str(adapter), str(MOST_PROMPT_LOGPROBS))
    finally:
        stop(server)
    return json.loads(told.splitlines()[-1])


def test_tokens_in_tokens_and_logprobs_out(answers: dict[str, Any]) -> None:
    got = answers["generate"]
    assert got["prompt_ids"] == [[504, 3575, 282], [504, 3575]]
    assert len(got["completion_ids"]) == 4
    for ids, logprobs, logprob_ids in zip(
        got["completion_ids"], got["logprobs"], got["logprob_token_ids"], strict=True
    ):
        assert 1 <= len(ids) <= 5
        assert [[one] for one in ids] == logprob_ids
        assert all(math.isfinite(one) and one <= 0 for (one,) in logprobs)
    assert len(answers["texts"]["completion_ids"][0]) == 2
    assert len(answers["regex"]["completion_ids"]) == 1


def test_a_chat_has_the_ids_of_its_prompt(answers: dict[str, Any]) -> None:
    assert len(answers["chat"]["prompt_ids"]) == 1
    assert len(answers["chat"]["completion_ids"]) == 2


def test_a_sequence_is_scored_as_it_was_drawn(answers: dict[str, Any]) -> None:
    drawn = [one for (one,) in answers["generate"]["logprobs"][0]]
    scored = [one for (one,) in answers["scored"]["actual_logprobs"][0]]
    known = [(was, now) for was, now in zip(drawn, scored, strict=True) if math.isfinite(now)]
    assert known, "at least one of the tokens is among the most likely ones"
    assert all(was == pytest.approx(now, abs=1e-3) for was, now in known)


def test_what_the_trainer_looks_up_is_there(answers: dict[str, Any]) -> None:
    assert answers["world"] == [1, 1]
    assert answers["dtype"].startswith("torch.")
    assert answers["max_model_len"] > 0
    info = answers["info"]
    assert info["lora_config"] == {"max_lora_rank": 32, "max_loras": 6}
    assert info["parallel_config"]["data_parallel_size"] == 1


def test_each_step_is_an_adapter_of_its_own(answers: dict[str, Any]) -> None:
    assert len(answers["adapter"]["completion_ids"]) == 1


def test_weights_of_a_whole_model_are_refused(answers: dict[str, Any]) -> None:
    assert "400" in answers["refused"]
    assert "/v1/load_lora_adapter" in answers["refused"]
    assert "no weight-transfer engine" in answers["no_transfer"]
