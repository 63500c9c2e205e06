"""The supervisor, with small programs in the server's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_parallm.config import resolve
from mlx_parallm.config.sources import Setting
from mlx_parallm.extras.supervise.parent import run_folder

SUPERVISE = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also when nohup runs the tests
from mlx_parallm.extras.supervise import parent
parent._QUICK_S, parent._LONGEST_PAUSE_S, parent._TICK_S, parent._STACKS_S = {quick}, 0.01, 0.05, 0.0
sys.exit(parent.Supervisor([sys.executable, "-c", sys.argv[1]], {limit}).run())
"""
SERVER = """
import json, os, signal, socket, sys, time
signal.alarm(120)  # it outlives its supervisor only if a test has failed
supervisor = socket.socket(fileno=int(os.environ["SUPERVISED_MLX_PARALLM"]))
begun = json.loads(supervisor.makefile().readline())
def report(**fields): supervisor.sendall(json.dumps(fields).encode() + b"\\n")
def say(*words): print(*words, flush=True)
say("begun", begun["restarts"], begun["reason"])
"""
PATIENCE_S = 60


@pytest.fixture
def supervisor(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """The supervisor of a server that does this after it has begun. Second: the seconds that it may be silent; third:
    those after which it has served for long."""
    program, limit, quick = (*request.param, *(None, 1000)[len(request.param) - 1 :])
    command = [sys.executable, "-c", SUPERVISE.format(limit=limit, quick=quick), SERVER + program]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    yield started
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


def ends(supervisor: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Its exit status, what the servers said, and its log."""
    said, log = supervisor.communicate(timeout=PATIENCE_S)
    print(log)
    return supervisor.returncode, said.splitlines(), log


@pytest.mark.parametrize("supervisor", [("sys.exit(2)",), ("os.kill(os.getpid(), signal.SIGSEGV)",)], indirect=True)
def test_a_server_that_never_served_is_not_started_again(supervisor) -> None:
    status, said, _ = ends(supervisor)
    assert said == ["begun 0 "]
    assert status in (2, 128 + signal.SIGSEGV)


@pytest.mark.parametrize("supervisor", [("report(); sys.exit(0)",)], indirect=True)
def test_a_server_that_ends_well_is_not_started_again(supervisor) -> None:
    assert ends(supervisor)[:2] == (0, ["begun 0 "])


FAILS = "report(changes={'route': {'tone': 1.0 + begun['restarts']}}); say(begun['changes']['route']); sys.exit(3)"


@pytest.mark.parametrize("supervisor", [(FAILS,)], indirect=True)
def test_one_that_keeps_failing_at_once_is_given_up_and_each_gets_what_the_last_one_had(supervisor) -> None:
    status, said, log = ends(supervisor)
    assert status == 3
    assert [line.partition(" ")[0] == "begun" for line in said] == [True, False] * 6
    assert said[2:4] == ["begun 1 ended with status 3", "{'tone': 1.0}"]
    assert said[-1] == "{'tone': 5.0}"
    assert "given up" in log


TWICE = "report(); sys.exit(5 if begun['restarts'] < 8 else 0)"


@pytest.mark.parametrize("supervisor", [(TWICE, None, 0)], indirect=True)
def test_one_that_served_for_long_is_started_again_as_often_as_it_fails(supervisor) -> None:
    status, said, _ = ends(supervisor)
    assert (status, len(said)) == (0, 9)


HANGS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); report(); say(begun['restarts']) or time.sleep(1000)"
SILENT = f"""
if begun['restarts']: report(); sys.exit(0)
{HANGS}
"""


@pytest.mark.parametrize("supervisor", [(SILENT, 0.2)], indirect=True)
def test_a_silent_server_is_killed_and_started_again(supervisor) -> None:
    status, said, log = ends(supervisor)
    assert (status, said[0]) == (0, "begun 0 ")
    assert said[-1].startswith("begun 1 gave no sign of life for 0 s")
    assert "is killed" in log


BEATS = """
for beat in range(30):
    report() if beat == 0 else supervisor.sendall(b"\\n")
    time.sleep(0.02)
say("served")
sys.exit(0)
"""


@pytest.mark.parametrize("supervisor", [(BEATS, 5.0)], indirect=True)
def test_a_server_that_shows_that_it_lives_is_left_alone(supervisor) -> None:
    assert ends(supervisor)[:2] == (0, ["begun 0 ", "served"])


STARTS = "time.sleep(1); say('served'); sys.exit(0)"


@pytest.mark.parametrize("supervisor", [(STARTS, 0.1)], indirect=True)
def test_a_server_may_be_silent_while_it_starts(supervisor) -> None:
    assert ends(supervisor)[:2] == (0, ["begun 0 ", "served"])


DRAINS = """
signal.signal(signal.SIGTERM, lambda number, frame: (say("drains"), sys.exit(7)))
report()
say("serves")
time.sleep(1000)
"""


@pytest.mark.parametrize("supervisor", [(DRAINS,)], indirect=True)
def test_a_signal_is_passed_on_and_the_exit_status_is_the_server_s(supervisor) -> None:
    assert [supervisor.stdout.readline() for _ in range(2)][1] == "serves\n"
    supervisor.send_signal(signal.SIGTERM)
    assert ends(supervisor)[:2] == (7, ["drains"])


@pytest.mark.parametrize("supervisor", [("report(); say('serves'); time.sleep(1000)",)], indirect=True)
def test_a_signal_that_the_server_does_not_handle_ends_both(supervisor) -> None:
    assert [supervisor.stdout.readline() for _ in range(2)][1] == "serves\n"
    supervisor.send_signal(signal.SIGHUP)
    assert ends(supervisor)[0] == -signal.SIGHUP


GONE = """
report()
say("serves")
try:
    left = supervisor.recv(1)
except ConnectionError:  # the supervisor had not read the report
    left = b""
open({path!r}, "w").write(str(len(left)))
"""


def test_the_server_sees_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    program = SERVER + GONE.format(path=str(tmp_path / "read"))
    command = [sys.executable, "-c", SUPERVISE.format(limit=None, quick=0), program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert [supervisor.stdout.readline() for _ in range(2)][1] == "serves\n"
        supervisor.kill()
        until = time.monotonic() + PATIENCE_S
        while not (read := tmp_path / "read").exists() or not read.read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
    assert read.read_text() == "0"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, False),
        ({"rl_training.enabled": True}, True),
        ({"rl_training.enabled": True, "checkpointing.checkpoint_dir": "run"}, False),
        ({"rl_training.enabled": True, "checkpointing.resume": True}, False),
    ],
)
def test_all_servers_train_in_one_folder(keys: dict[str, object], named: bool) -> None:
    config = resolve({key: Setting(value, "a test") for key, value in keys.items()}).config
    variables = run_folder(config)
    assert bool(variables) == named
    if named:
        assert resolve({}, variables).config.checkpointing.checkpoint_dir is not None
