"""The scoring process: whatever a scorer does there costs its own group only."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rl.user_package import install

from mlx_parallm.core import AdapterRef, Collection, FinishReason, Trajectory
from mlx_parallm.errors import InvalidRequestError, OverloadedError
from mlx_parallm.rl.parts import ScoringError
from mlx_parallm.rl.scoring import pool as pool_module
from mlx_parallm.rl.scoring.registry import GROUP
from mlx_parallm.rl.scoring.service import ScoringService

SHORT_S = 2.0
LONG_S = 60.0

SOURCE = '''
import json, os, re, subprocess, sys, time

def size(sample):
    return len(sample.text)

def seen(sample):
    assert (sample.prompt_tokens, sample.completion_tokens) == (2, 4)
    return {"stop": 1, "length": 2}[sample.finish_reason] + sample.metadata["bonus"]
seen.requires = ("bonus",)

def throws(sample):
    raise KeyError("no such thing")

def exits(sample):
    raise SystemExit(0)

def vanishes(sample):
    os._exit(3)

def not_finite(sample):
    return float(sample.text)

def word(sample):
    return "1.0"

def sleeps(sample):
    time.sleep(1000)

def holds_the_gil(sample):
    re.match(r"(a+)+$", "a" * 60 + "b")

def prints(sample):
    print("not a reward")
    print(json.dumps({"id": 1, "rewards": [99.0]}), flush=True)
    os.write(1, b"nor this\\n")
    subprocess.run(["echo", "nor that"], check=True)
    return float(sys.stdin.read() == "")

def vandal(sample):
    for number in range(3, 64):
        try:
            os.write(number, b"{]\\n")
        except OSError:
            pass
    return 1.0

def waits(sample):
    """Says who it is, and waits to be let go."""
    folder = sample.metadata["folder"]
    with open(folder + "/pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(folder + "/pid.new", folder + "/pid")
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    return 7.0

def busy(sample):
    with open(sample.metadata["folder"] + "/pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sample.metadata["folder"] + "/pid.new", sample.metadata["folder"] + "/pid")
    holds_the_gil(sample)

def pid(sample):
    return os.getpid()

def nice(sample):
    return os.nice(0)

def mlx(sample):
    import mlx_parallm
    return float("mlx.core" in sys.modules or mlx_parallm.BLAS.fast)
'''
NAMES = ["size", "seen", "throws", "exits", "vanishes", "not_finite", "word", "sleeps", "holds_the_gil", "prints"]
NAMES += ["vandal", "waits", "busy", "pid", "nice", "mlx", "absent"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Seen by this process, and by the child through what it is told."""
    install(tmp_path, "user_scorers", SOURCE, GROUP, *NAMES)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
async def service(package):
    made: list[ScoringService] = []

    def make(timeout_s: float = LONG_S, batch_size: int = 32, processes: int = 1) -> ScoringService:
        made.append(ScoringService(processes, batch_size, timeout_s))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def group(scorer, *texts, finish_reason=FinishReason.STOP, client="", **metadata):
    return [
        Trajectory(
            trajectory_id=f"t{index}",
            group_id="g",
            group_size=len(texts),
            adapter=AdapterRef("tone", 1),
            prompt_ids=(1, 2),
            completion_ids=(3, 4, 5, 6),
            sampling_logprobs=(-1.0,) * 4,
            temperature=1.0,
            text=text,
            finish_reason=finish_reason,
            collection=Collection(scorer, metadata, client),
            created=0.0,
        )
        for index, text in enumerate(texts)
    ]


async def fault(service, scorer, *texts):
    with pytest.raises(ScoringError) as caught:
        await service.score(group(scorer, *(texts or ("x",))))
    assert str(caught.value).startswith(scorer)
    return str(caught.value)


async def file_of(folder: Path, name: str) -> str:
    while not (folder / name).exists():
        await asyncio.sleep(0.01)
    return (folder / name).read_text()


async def gone(pid: int) -> None:
    """A process that is dead, a zombie perhaps."""
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if (state := Path(f"/proc/{pid}/stat")).exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        await asyncio.sleep(0.02)


# -- rewards ---------------------------------------------------------------------------------------


async def test_rewards_come_in_order(service):
    scoring = service()
    assert await scoring.score(group("exact", "a", "b", " a ", answer="a")) == (1, 0, 1)
    assert await scoring.score(group("math", "0.5", "2", answer="\\frac12")) == (1, 0)
    assert await scoring.score(group("size", "a", "", "abc")) == (1, 0, 3)
    assert await scoring.score([]) == ()


async def test_a_users_scorer_sees_the_sample_and_joins_sums(service):
    scoring = service()
    assert await scoring.score(group("seen", "x", bonus=10)) == (11,)
    assert await scoring.score(group("seen", "x", finish_reason=FinishReason.LENGTH, bonus=0.5)) == (2.5,)
    assert await scoring.score(group("2*size + 1*exact", "cat", "cow", answer="cat")) == (7, 6)


async def test_texts_of_any_kind_cross(service):
    texts = ["", "line\nline", "é\u2028𝄞", "\ud800", "\0", "x" * 300_000]
    assert await service().score(group("size", *texts)) == tuple(map(len, texts))


async def test_many_groups_at_once(service):
    scoring = service(batch_size=8)
    groups = [group("size", *("x" * (i * j) for j in range(3))) for i in range(40)]
    assert await asyncio.gather(*map(scoring.score, groups)) == [(0, i, 2 * i) for i in range(40)]


async def test_the_child_is_nice_and_has_neither_mlx_nor_a_blas(service):
    scoring = service()
    assert (await scoring.score(group("nice", "x")))[0] >= 10
    assert await scoring.score(group("mlx", "x")) == (0,)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scorer", "text", "why"),
    [
        ("throws", "x", "no such thing"),
        ("exits", "x", "SystemExit"),
        ("not_finite", "nan", "finite"),
        ("not_finite", "-inf", "finite"),
        ("not_finite", "word", "could not convert"),
        ("word", "x", "str, not a number"),
        ("absent", "x", "absent"),
        ("exact", "x", "metadata.answer is missing"),
        ("1e300*size", "x" * 10, None),
        ("1e308*size", "x" * 10, "finite"),
    ],
)
async def test_a_scorer_that_fails_costs_its_group_and_keeps_the_child(scorer, text, why, service):
    scoring = service()
    before, bad, after, child = await asyncio.gather(
        *(
            scoring.score(g)
            for g in (group("pid", "x"), group(scorer, "1", text), group("size", "ab"), group("pid", "x"))
        ),
        return_exceptions=True,
    )
    assert after == (2,)
    assert child == before
    if why is None:
        assert bad == (1e300, 1e301)
    else:
        assert isinstance(bad, ScoringError)
        assert why in str(bad)
        assert str(bad).startswith(scorer)


@pytest.mark.parametrize("scorer", ["sleeps", "holds_the_gil"])
async def test_a_scorer_that_hangs_is_killed_and_others_of_its_batch_are_scored(scorer, service):
    scoring = service(SHORT_S)
    first, bad, after, child = await asyncio.gather(
        *(scoring.score(g) for g in (group("pid", "x"), group(scorer, "x"), group("size", "ab"), group("pid", "x"))),
        return_exceptions=True,
    )
    assert isinstance(bad, ScoringError)
    assert "took more than 2 s" in str(bad)
    assert after == (2,)
    assert child != first
    with pytest.raises(ProcessLookupError):
        os.kill(int(first[0]), 0)


async def test_a_child_that_always_dies_is_given_up_after_a_second_try(service):
    scoring = service()
    bad, after = await asyncio.gather(
        scoring.score(group("vanishes", "x")), scoring.score(group("size", "ab")), return_exceptions=True
    )
    assert isinstance(bad, ScoringError)
    assert "died" in str(bad)
    assert after == (2,)


async def test_a_child_that_is_killed_in_the_middle_costs_nothing(service, tmp_path):
    scoring = service()
    scored = [
        asyncio.create_task(scoring.score(g)) for g in (group("waits", "x", folder=str(tmp_path)), group("size", "ab"))
    ]
    first = await file_of(tmp_path, "pid")
    (tmp_path / "pid").unlink()
    os.kill(int(first), signal.SIGKILL)
    assert await file_of(tmp_path, "pid") != first
    (tmp_path / "go").touch()
    assert await asyncio.gather(*scored) == [(7,), (2,)]


async def test_a_child_that_is_killed_while_idle_costs_nothing(service):
    scoring = service()
    (child,) = await scoring.score(group("pid", "x"))
    os.kill(int(child), signal.SIGKILL)
    assert await scoring.score(group("size", "ab")) == (2,)
    assert (await scoring.score(group("pid", "x")))[0] != child


async def test_what_a_scorer_prints_is_no_answer(service):
    scoring = service()
    assert await scoring.score(group("prints", "a", "b")) == (1, 1)
    assert await scoring.score(group("size", "ab")) == (2,)


async def test_what_is_no_json_from_the_child_is_a_fault(service):
    scoring = service()
    bad, after = await asyncio.gather(
        scoring.score(group("vandal", "x")), scoring.score(group("size", "ab")), return_exceptions=True
    )
    assert isinstance(bad, ScoringError)
    assert "no answer" in str(bad)
    assert after == (2,)


async def test_metadata_that_is_no_json_costs_its_group(service):
    scoring = service()
    with pytest.raises(ScoringError, match="not JSON"):
        await scoring.score(group("size", "x", thing={1, 2}))
    assert await scoring.score(group("size", "ab")) == (2,)


async def test_a_child_that_cannot_be_started_costs_the_groups_that_wanted_it(service, monkeypatch):
    scoring = service()
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        assert "could not be started" in await fault(scoring, "size")
    assert await scoring.score(group("size", "ab")) == (2,)


async def test_a_listener_that_goes_away_disturbs_nobody(service, tmp_path):
    scoring = service()
    gone = asyncio.create_task(scoring.score(group("waits", "x", folder=str(tmp_path))))
    stays = asyncio.create_task(scoring.score(group("size", "ab")))
    await file_of(tmp_path, "pid")
    gone.cancel()
    (tmp_path / "go").touch()
    assert await stays == (2,)
    assert gone.cancelled()


async def test_close_ends_the_child_and_fails_what_waits(service, tmp_path):
    scoring = service()
    waiting = asyncio.create_task(scoring.score(group("waits", "x", folder=str(tmp_path))))
    child = int(await file_of(tmp_path, "pid"))
    await scoring.close()
    with pytest.raises(ScoringError, match="closed"):
        await waiting
    with pytest.raises(ScoringError, match="closed"):
        await scoring.score(group("size", "x"))
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# -- batches ---------------------------------------------------------------------------------------


async def test_groups_are_sent_in_batches_of_bounded_size(monkeypatch):
    """Groups of 1, 2, 2, 3, 9 and 1 in batches of 4: each batch waits until the one before is answered."""
    log: list[str] = []
    sizes = (1, 2, 2, 3, 9, 1)
    first = next(pool_module._numbers) + 1

    class FakeWorker:
        alive = True

        @classmethod
        async def start(cls, limit_s):
            assert limit_s == LONG_S
            return cls()

        def send(self, line):
            log.append(f"send {line.count(b'text')}")

        async def answer(self, number):
            await asyncio.sleep(0)
            size = sizes[number - first]
            log.append(f"answer {size}")
            return {"id": number, "rewards": [0.0] * size}

        async def kill(self):
            log.append("kill")

    monkeypatch.setattr(pool_module, "Worker", FakeWorker)
    scoring = ScoringService(1, 4, LONG_S)
    await asyncio.gather(*(scoring.score(group("size", *["x"] * size)) for size in sizes))
    batches = [[1], [2, 2], [3], [9], [1]]
    assert log == [f"{verb} {size}" for batch in batches for verb in ("send", "answer") for size in batch]
    await scoring.close()
    assert log[-1] == "kill"


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
from rl.test_scoring_process import LONG_S, ScoringService, group

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
    await check(Collection("size"))
    await check(Collection("0.5*seen + 0.5*size", {"bonus": 0}))
    for name, metadata, param, message in (
        ("seen", {}, "metadata", "metadata.bonus is missing"),
        ("sise", {}, "scoring_function", "did you mean size"),
        ("absent", {}, "scoring_function", "absent cannot be used"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await check(Collection(name, metadata))
        assert caught.value.param == param
    assert "user_scorers" not in sys.modules


async def test_a_package_that_breaks_on_import_is_refused(service, tmp_path):
    install(tmp_path, "broken_scorers", "print('hello')\nraise SystemExit('no licence')\n", GROUP, "broken")
    install(tmp_path, "dying_scorers", "import os\nos._exit(0)\n", GROUP, "dying")
    check = service().check
    for name, message in (("broken", "no licence"), ("dying", "could not be loaded")):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await check(Collection(name))
        assert caught.value.param == "scoring_function"


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
async def test_what_takes_long_to_check_is_refused_and_takes_none_of_the_servers_time(scorer, metadata, service):
    check = service().check
    used = time.process_time()
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequestError, match="is too complex: checking it took more than 1 s") as caught:
            await check(Collection(scorer, metadata))
        assert caught.value.param == "metadata"
    assert time.process_time() - used < 0.5  # the child used a second


async def test_what_is_wrong_and_what_is_right_is_told_by_the_child(service):
    check = service().check
    await check(Collection("json_schema", {"schema": {"type": "object"}}))
    await check(Collection("0.5*regex + 0.5*exact", {"pattern": "a+", "answer": "a"}))
    for scorer, metadata, message in (
        ("regex", {"pattern": "("}, "metadata.pattern is not a regular expression"),
        ("regex", {"pattern": "a" * 5000}, "metadata.pattern must be text of at most 4096 characters"),
        ("json_schema", {"schema": {"type": "strange"}}, "metadata.schema is not a JSON schema"),
        ("json_schema", {"schema": {"enum": ["x" * 70000]}}, "metadata.schema must have at most 65536 characters"),
        ("json_schema", {}, "metadata.schema is missing"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            await check(Collection(scorer, metadata))


async def test_a_check_that_waits_too_long_says_so_and_leaves_its_place(service, monkeypatch):
    monkeypatch.setattr("mlx_parallm.rl.scoring.checks._PATIENCE_S", 0.0)
    scoring = service()
    with pytest.raises(OverloadedError):
        await scoring.check(Collection("regex", {"pattern": "a"}))
    monkeypatch.undo()
    await scoring.check(Collection("regex", {"pattern": "a"}))
