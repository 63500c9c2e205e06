"""Scoring for several clients: what requests bring is checked apart, slow ones hold up nobody, children end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rl.scoring_rig import file_of, gone, group
from rl.user_package import install

from mlx_parallm.core.requests import CollectionSpec
from mlx_parallm.errors import InvalidRequestError, OverloadedError
from mlx_parallm.rl.scoring.pool import ScoringError
from mlx_parallm.rl.scoring.scorers import GROUP

pytestmark = pytest.mark.ci

# -- several clients -------------------------------------------------------------------------------


async def test_a_slow_client_leaves_a_process_to_the_others(service, tmp_path):
    """None of the slow groups ends before the other client's are scored, though all were there first."""
    scoring = service(processes=2)
    slow = [
        asyncio.create_task(scoring.score(group("waits", "x", client="slow", folder=str(tmp_path)))) for _ in range(6)
    ]
    await file_of(tmp_path, "pid")
    for _ in range(3):
        assert await scoring.score(group("size", "ab", client="other")) == (2,)
    assert await scoring.score(group("size", "abc", client="slow")) == (3,)  # the same client, another function
    assert not any(one.done() for one in slow)
    (tmp_path / "go").touch()
    assert await asyncio.gather(*slow) == [(7,)] * 6


@pytest.mark.parametrize(
    ("scorer", "metadata"),
    [
        ("regex", {"pattern": "(a+)+$"}),
        ("0.5*exact + 0.5*json_schema", {"answer": "x", "schema": {"type": "string", "pattern": "(a+)+$"}}),
    ],
)
async def test_a_built_in_scorer_that_takes_too_long_costs_its_group_and_keeps_the_child(scorer, metadata, service):
    scoring = service()
    (child,) = await scoring.score(group("pid", "x"))
    with pytest.raises(ScoringError, match="took more than 1 s of processor time"):
        await scoring.score(group(scorer, '"' + "a" * 60 + 'b"', **metadata))
    assert await scoring.score(group("pid", "x")) == (child,)


PARENT = """
import asyncio, sys
from mlx_parallm.rl.scoring.service import ScoringService
from rl.scoring_rig import LONG_S, group

async def main():
    await ScoringService(1, 32, LONG_S).score(group("busy", "x", folder=sys.argv[1]))

asyncio.run(main())
"""


def test_children_end_with_a_server_that_is_killed(package):
    """The child holds the interpreter's lock all the time, so nothing written in Python would notice."""
    places = os.pathsep.join([str(package), str(Path(__file__).parents[1]), *filter(None, sys.path)])
    server = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(package)],
        env={**os.environ, "PYTHONPATH": places},
        stderr=subprocess.DEVNULL,
    )
    try:
        child = int(asyncio.run(file_of(package, "pid")))
    finally:
        server.kill()
        server.wait()
    asyncio.run(asyncio.wait_for(gone(child), 20))


# -- check -----------------------------------------------------------------------------------------


async def test_a_users_scorer_is_checked_without_importing_it_here(service):
    check = service().check
    await check(CollectionSpec("size"))
    await check(CollectionSpec("0.5*seen + 0.5*size", {"bonus": 0}))
    for name, metadata, param, message in (
        ("seen", {}, "metadata", "metadata.bonus is missing"),
        ("sise", {}, "scoring_function", "did you mean size"),
        ("absent", {}, "scoring_function", "absent cannot be used"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await check(CollectionSpec(name, metadata))
        assert caught.value.param == param
    assert "user_scorers" not in sys.modules


async def test_a_package_that_breaks_on_import_is_refused(service, tmp_path):
    install(tmp_path, "broken_scorers", "print('hello')\nraise SystemExit('no licence')\n", GROUP, "broken")
    install(tmp_path, "dying_scorers", "import os\nos._exit(0)\n", GROUP, "dying")
    check = service().check
    for name, message in (("broken", "no licence"), ("dying", "could not be loaded")):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await check(CollectionSpec(name))
        assert caught.value.param == "scoring_function"


async def test_what_the_machine_lacked_at_an_import_is_not_held_against_the_scorer(service, tmp_path, monkeypatch):
    """The package's file stands for descriptors, memory or a volume that comes back."""
    short = "import os, pathlib\nif not pathlib.Path(__file__).with_name('there').exists():\n    raise {error}\n"
    for number, error in enumerate(("OSError(24, 'Too many open files')", "MemoryError('no room')")):
        install(tmp_path, f"short_{number}", short.format(error=error) + f"def short{number}(sample):\n    return 1\n",
                GROUP, f"short{number}")  # fmt: skip
    check = service().check
    for name, message in (("short0", "Too many open files"), ("short1", "no room")):
        with pytest.raises(InvalidRequestError, match=message):
            await check(CollectionSpec(name))
    (tmp_path / "there").touch()
    for name in ("short0", "short1"):
        await check(CollectionSpec(name))


BOMB = {"$schema": "http://json-schema.org/draft-04/schema#", "enum": [{"a": number} for number in range(3000)]}
"""Draft 4 compares the items of an enum each with each: minutes of Python."""


@pytest.mark.parametrize(
    ("scorer", "metadata"),
    [
        ("json_schema", {"schema": BOMB}),
        ("1*length + 1*json_schema", {"target_length": 3, "schema": json.dumps(BOMB)}),
        ("regex", {"pattern": "(?i)" + "".join(f"[\0-\uffff{chr(0x4E00 + at)}]" for at in range(600))}),
    ],
)
async def test_what_takes_long_to_check_is_refused_and_takes_none_of_the_servers_time(
    scorer, metadata, service, monkeypatch
):
    for patience in ("_CHECK_S", "_WAIT_S"):  # a busy machine takes long for a second of processor time
        monkeypatch.setattr(f"mlx_parallm.rl.scoring.service.{patience}", 100.0)
    check = service().check
    used = time.thread_time()  # of the event loop's thread
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequestError, match="is too complex: checking it took more than 1 s") as caught:
            await check(CollectionSpec(scorer, metadata))
        assert caught.value.param == "metadata"
    assert time.thread_time() - used < 1.0  # the child used a second


BEGINS_AND_HANGS = """print('{"id": 1, "begun": true}', flush=True); import time; time.sleep(60)"""


@pytest.mark.parametrize(
    "child",
    [("/no/such/program",), (sys.executable, "-c", ""), (sys.executable, "-c", BEGINS_AND_HANGS)],
    ids=["cannot be started", "dies", "gets no time"],
)
async def test_a_fault_of_the_checking_process_refuses_nothing_for_good(child, service, monkeypatch):
    monkeypatch.setattr("mlx_parallm.rl.scoring.service._CHECK_S", 0.2)
    broken, collection = service(), CollectionSpec("regex", {"pattern": "[0-9]+"})
    monkeypatch.undo()
    with monkeypatch.context() as patched:
        patched.setattr("mlx_parallm.rl.scoring.pool.command", lambda module: child)
        with pytest.raises(OverloadedError, match="could not be checked now; try again"):
            await broken.check(collection)
    await broken.check(collection)


async def test_a_check_that_waits_too_long_says_so_and_leaves_its_place(service, monkeypatch):
    monkeypatch.setattr("mlx_parallm.rl.scoring.service._WAIT_S", 0.0)
    scoring = service()
    with pytest.raises(OverloadedError):
        await scoring.check(CollectionSpec("regex", {"pattern": "a"}))
    monkeypatch.undo()
    await scoring.check(CollectionSpec("regex", {"pattern": "a"}))
