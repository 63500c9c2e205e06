"""Every target keeps its promise for the inputs that are kept and, on every CI run, for the same 200
changes of them. `scripts/fuzz` looks for new ones, guided by the branches that inputs reach."""

import json
import os
import struct
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from fuzz import driving
from fuzz.driving import CORPUS, NAMES, Runner, Target, TooSlow
from fuzz.mutation import bytes_mutated, json_with, packed, safetensors_with, unpacked

ROOT = Path(__file__).resolve().parents[2]
COUNT = 200
"""Of each target."""


def driven(found, *arguments):
    """Runs the driver that needs no package, in a process that the targets may change as they like.
    The limit is loose: how fast a machine is does not decide a test."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    command = [sys.executable, "-m", "fuzz", *arguments, "--found", str(found), "--limit", "20"]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    inputs = {path.name: path.read_bytes()[:2000] for path in found.iterdir()}
    assert done.returncode == 0, f"{done.stderr[-4000:]}\n{inputs}"
    return done.stdout


def test_for_all_inputs_that_are_kept(tmp_path):
    said = driven(tmp_path, *NAMES)
    for name in NAMES:
        kept = len(list((CORPUS / name).iterdir()))
        assert kept
        assert f"{name}: {kept} kept inputs and 0 new ones" in said


@pytest.mark.ci
def test_for_changes_of_them(tmp_path):
    driven(tmp_path, *NAMES, "--count", str(COUNT), "--seed", "1")


# -- the driver ----------------------------------------------------------------------------------


def test_an_input_that_breaks_a_promise_is_found_and_written(tmp_path):
    def run(data):
        assert b"b" not in data

    target = Target("letters", run, lambda data, rng: data + rng.choice((b"a", b"b")))
    runner = Runner(target, tmp_path)
    with pytest.raises(AssertionError):
        deque(map(runner, target.changes([b""], seed=1)), maxlen=0)
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("letters-")
    assert b"b" in written.read_bytes()


def test_one_that_takes_too_long_is_found_even_if_it_catches_every_exception(tmp_path):
    def run(data):
        while True:
            with suppress(Exception):
                sum(range(1000))

    with pytest.raises(TooSlow):
        Runner(Target("endless", run, bytes_mutated), tmp_path, limit_s=0.05)(b"x")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"x"]


def test_one_after_which_the_process_is_too_large_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(driving, "MEMORY_LIMIT", 1 << 20)
    with pytest.raises(MemoryError):
        Runner(Target("large", lambda data: None, bytes_mutated), tmp_path)(b"x")


def test_changes_keep_the_form_that_readers_look_at_first():
    rng, mutate = Random(1), safetensors_with(["a"])
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file = struct.pack("<Q", len(header)) + header + bytes(4)
    found = [mutate(file, rng) for _ in range(200)]
    lengths = [struct.unpack("<Q", each[:8])[0] for each in found if len(each) >= 8]
    assert sum(length <= len(each) - 8 for length, each in zip(lengths, found, strict=False)) > 120
    of_json = json_with(["name"])
    parsed = 0
    for _ in range(200):
        try:
            json.loads(of_json(b'{"name": [1, "x"]}', rng))
            parsed += 1
        except (ValueError, RecursionError):
            pass
    assert parsed > 150
    files = {"a.json": b"{}", "b": b"\n\n"}
    assert unpacked(packed(files)) == files
