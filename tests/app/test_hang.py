"""A device that hangs, in a server as users start it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from app.test_restarts import write
from main_job.serving import free_port
from tiny import save_tiny

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]

LIMIT_S = 4
"""A hang counts as one after so many seconds, which no piece of work on a tiny model takes."""
NAMES = ("tone", "gone", "rewritten")
"""Adapters in folders of these names."""
PROGRAM = Path(__file__).parents[1] / "hanging_server.py"


class Running:
    """A server over a tiny model whose device hangs when it is told so."""

    def __init__(self, folder: Path, *flags: str) -> None:
        save_tiny("llama", folder / "model")
        self.order, port = folder / "order", free_port()
        kept = ("--model-path", str(folder / "model"), "--checkpoint-dir", str(folder / "run"))
        sizes = ("--kv-cache-memory", "16MB", "--lora-rank", "4", "--update-frequency", "4")
        end = ("--device-timeout", str(LIMIT_S), "--port", str(port), *flags)
        command = (sys.executable, "-P", str(PROGRAM), str(self.order), "--enable-rl-training", *kept, *sizes, *end)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def answers(self, path: str) -> bool:
        with suppress(httpx.TransportError):
            return self.http.get(path).status_code == 200
        time.sleep(0.1)
        return False

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(0.1)

    def restarted(self, times: int) -> None:
        """Waits until it takes requests and was started again so many times."""

        def found() -> bool:
            with suppress(httpx.TransportError):
                return f"mlx_parallm_restarts {times}.0\n" in self.http.get("/metrics").text
            return False

        self.until(found)

    def child(self) -> int:
        """The process id of the server, which has the only other process group."""
        return int(subprocess.check_output(["pgrep", "-P", str(self.process.pid)]))

    def step(self) -> int:
        return self.http.get("/v1/training/status").json()["step"]

    def state(self) -> dict:
        """What clients see: greedy answers by adapter, and the schedule."""
        schedule = self.http.get("/v1/training/schedule").json()
        answers = {name: self.ask(name) for name in ("tone", "default", "unnamed")}
        return {**answers, "schedule": {name: schedule[name] for name in ("mode", "max_decode_stall_ms")}}

    def ask(self, name: str) -> dict:
        model = {} if name == "unnamed" else {"model": name}
        answer = self.post("/v1/completions", prompt="abc", max_tokens=8, temperature=0, ignore_eos=True, **model)
        return {"text": answer["choices"][0]["text"], "adapter": answer["lora_adapter"]}

    def post(self, path: str, **body: object) -> dict:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def learn(server: Running) -> None:
    """Rewards the answers of one update."""
    body = {"prompt": "abc", "n": 4, "max_tokens": 4, "seed": 1, "collect_trajectory": True, "model": "default"}
    if not server.step():
        body["model"] = "base"
    for at, trajectory in enumerate(server.post("/v1/completions", **body)["trajectory_ids"]):
        server.post("/v1/training/feedback", trajectory_id=trajectory, score=float(at))


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Running]:
    """A server that takes requests; killed at the end of the block."""
    server = Running(folder, *flags)
    try:
        while not server.answers("/ready"):
            assert server.process.poll() is None, server.lines
        yield server
    finally:
        server.process.kill()
        server.thread.join()
        server.http.close()


def test_a_supervised_server_is_as_before_after_a_hang_and_a_crash(tmp_path: Path) -> None:
    """The first hang keeps the interpreter lock, so only the supervisor can see it; the second one is in an update."""
    for seed, name in enumerate(NAMES):
        write(tmp_path, seed, name)
    with running(tmp_path, "--supervise", "--allowed-adapter-roots", str(tmp_path)) as server:
        for name in NAMES:
            server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(tmp_path / name))
        server.post("/v1/adapters/route", weights={"tone": 1.0})
        server.post("/v1/training/schedule", mode="training_priority", max_decode_stall_ms=250)
        learn(server)
        server.until(lambda: server.step() == 1)
        before = server.state()
        assert before["default"]["adapter"] == "default@1"
        assert before["unnamed"]["adapter"] == "tone@1"

        shutil.rmtree(tmp_path / "gone")
        write(tmp_path, 9, "rewritten")
        server.order.write_text("_forward with the lock")
        with pytest.raises(httpx.TransportError):
            server.http.post("/v1/completions", json={"prompt": "abc"})
        server.restarted(1)
        assert server.state() == before
        assert server.ask("rewritten")["adapter"] == "rewritten@2"
        assert server.http.post("/v1/completions", json={"model": "gone", "prompt": "a"}).status_code == 404

        server.order.write_text("_train")
        learn(server)
        server.restarted(2)
        server.until(lambda: server.step() == 2)  # the update was made again, from what was acknowledged
        after = server.state()
        assert after["default"]["adapter"] == "default@2"
        assert {**after, "default": None} == {**before, "default": None}

        os.kill(server.child(), signal.SIGKILL)
        server.restarted(3)
        assert server.state() == after

        server.process.kill()
        while server.answers("/health"):
            pass
        server.thread.join()  # nothing has its standard error any more: the server ends with its supervisor
    said = "".join(server.lines)
    assert 'hanging_server.py", line' in said, "the stacks of the threads"
    assert said.count("it is started again") == 3
    assert "gone@1 is not as before the restart" in said


def test_a_device_that_hangs_is_named_and_ends_the_server(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.order.write_text("_forward")
        body = {"prompt": "abc", "max_tokens": 4, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            while (health := server.http.get("/health")).status_code == 200:
                pass
            refused = server.http.post("/v1/completions", json={"prompt": "abc"})
            *_, error, _, done, _ = stream.iter_lines()
        assert done == "data: [DONE]"
        for text in (health.text, refused.text, error):
            assert "a prefill has taken" in text
        assert (health.status_code, refused.status_code) == (503, 503)
        assert server.process.wait(60) == 1
        server.thread.join()
        assert "in hang_or_run" in "".join(server.lines), "the log shows where it hangs"
