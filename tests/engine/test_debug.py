"""The debug switches: a timeline of device units, checks after every unit, decoding without lookahead."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from harness import make_harness

from mlx_parallm.core.requests import WorkClass
from mlx_parallm.engine.stats import UnitTrace
from mlx_parallm.errors import ConfigError


def read_trace(path):
    """As the viewers read it, which need no closing bracket."""
    return json.loads(path.read_text() + "]")


def test_every_unit_is_in_the_trace_in_order(tmp_path):
    path = tmp_path / "trace.json"
    made = make_harness(trace=path)
    made.answer("a", [5, 6, 7, 8], max_tokens=3)
    named, *units = read_trace(path)
    assert (named["ph"], named["args"]) == ("M", {"name": "device"})
    assert {unit["ph"] for unit in units} == {"X"}
    assert (units[0]["name"], units[0]["args"]) == ("forward", {"rows": 0, "prompts": 1, "tokens": 4})
    rows = [unit["args"]["rows"] for unit in units if unit["name"] == "forward"]
    assert rows == [0] + [1] * (made.loop.counters.steps - 1)
    assert all(unit["dur"] > 0 for unit in units)
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(units))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
def test_a_full_disk_ends_the_trace_and_no_request(tmp_path, caplog):
    made = make_harness(trace=Path("/dev/full"))
    made.answer("a", [5, 6, 7, 8], max_tokens=3)
    assert len(made.tokens("a")) == 3
    assert [each.getMessage() for each in caplog.records] == [
        "debug.trace: nothing more is recorded: No space left on device"
    ]


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"debug\.trace: .*none/trace.json cannot be written: No such file"):
        UnitTrace(tmp_path / "none" / "trace.json")


def test_the_state_lists_each_sequence_with_where_it_is():
    made = make_harness(max_rows=1)
    made.submit("first", [5, 6, 7, 8], max_tokens=9)
    made.submit("second", [9] * 6, work_class=WorkClass.TRAINING)
    made.until(lambda: len(made.tokens("first")) >= 2)
    live, waiting = made.loop.stats().detail["sequences"]
    assert (live["request_id"], live["index"], live["status"], live["class"]) == ("first", 0, "running", "inference")
    assert (live["prompt_tokens"], live["generated_tokens"]) == (4, 2)
    assert live["computed_tokens"] >= 5, "the prompt, and the first token of the answer"
    assert (waiting["request_id"], waiting["status"], waiting["class"]) == ("second", "waiting", "training")
    assert (waiting["prompt_tokens"], waiting["computed_tokens"], waiting["generated_tokens"]) == (6, 0, 0)


def test_a_broken_row_ends_the_step_that_broke_it():
    made = make_harness(check_every_unit=True)
    made.submit("a", [5, 6, 7, 8])
    made.loop.step()
    made.runner.cache.open(8)  # a row of no request
    with pytest.raises(AssertionError):
        made.loop.step()
