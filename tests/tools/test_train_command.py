"""How benchmarks run `mlx_parallm_train` in a folder, and stop it early. A stand-in takes the place of the command."""

import time

import pytest

from benchmarks.lib.training.command import STOPPED, checked, held_out_rows, logged, prepare, train
from benchmarks.lib.training.learning_tasks import questions
from benchmarks.studies import curriculum

STAND_IN = """
import itertools, json, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
with open(flags["--log"], "a") as log:
    print(json.dumps({"step": 0, "kind": "evaluation", "eval_mean": 0.3}), file=log, flush=True)
    for step in range(1, int(flags["--steps"]) + 1):
        print(json.dumps({"step": step, "kind": "update", "eval_mean": 0.3 + step / 20}), file=log, flush=True)
        print('{"kind": "other", "step": 100', end="", file=log, flush=True)
        time.sleep(float(flags["--learning-rate"]))
        print("}", file=log, flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "mlx_parallm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    return tmp_path


def flags(steps, seconds):
    return {"steps": steps, "learning-rate": seconds}


def test_a_run_is_waited_for(folder):
    prepare(folder, "a: 1\n", "def score(sample): ...\n", [{"prompt": "Hello"}])
    assert train(folder, flags(2, 0)) == 0
    assert [line["step"] for line in logged(folder)] == [0, 1, 100, 2, 100]
    assert (folder / "tasks.jsonl").read_text() == '{"prompt": "Hello"}\n'
    assert (folder / "config.yaml").read_text() == "a: 1\n"


def test_the_evaluation_that_reaches_the_goal_ends_the_run(folder):
    began = time.monotonic()
    exit_code = train(folder, flags(1000, 0.1), until=curriculum._is_learnt)
    checked(exit_code)
    assert exit_code == STOPPED
    assert time.monotonic() - began < 60
    evaluations = curriculum._evaluations(logged(folder))
    assert 3 <= len(evaluations) < 1000
    assert curriculum._steps_to_goal(evaluations) == pytest.approx(2)


def test_a_run_that_fails_is_told(folder):
    exit_code = train(folder, flags("many", 0))
    with pytest.raises(RuntimeError, match="exit code 1"):
        checked(exit_code)


def test_held_out_questions_have_other_adjectives_than_those_trained_on():
    asked = {question.text for question in questions(slice(0, 16))}
    held_out = held_out_rows(40, kind="one word")
    assert len({task["prompt"] for task in held_out} - asked) == 40
    assert {task["kind"] for task in held_out} == {"one word"}
