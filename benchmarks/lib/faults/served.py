"""A server on a `Disk`, a client that uses all that it keeps, and what must be there after each fault.

`Client.round` collects answers, rewards them, makes an update, saves a checkpoint, loads an adapter and pauses
training. What was answered with success is remembered, and `lost` says what of it a server that started again has not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.durability.processes import COMMON, small_model
from benchmarks.lib.faults import kept
from benchmarks.lib.faults.disk import Disk

START_S, ANSWER_S = 180.0, 600.0
STORAGE_FAILED = 507
BY_REQUEST = ("--update-frequency", "100000", "--trajectory-buffer-size", "100000", "--max-staleness", "1000")
OTHERS = ("--kv-cache-memory", "64MB", "--max-model-len", "2048", "--speculation", "off", "--access-log", "false")
_NO_ROLLBACK = {"MLX_PARALLM_RL_TRAINING__DIVERGENCE__REWARD__LIMIT": "1000"}
_URL = re.compile(rb"base URL +(http://[^/]+)/")
_ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")


class WrongAnswerError(Exception):
    """An answer that is neither a success nor says that the disk failed."""


class Server:
    """Servers, one after the other, on one run. `run`: the run's folder and all other files that a server writes, on
    the disk. `adapters`: the folder of --adapter-dir, which is not."""

    def __init__(self, folder: Path, *flags: str) -> None:
        site = folder / "site"
        site.mkdir(parents=True)
        self.disk, self.run = Disk(folder / "run", site), folder / "run"
        self.model, self.adapters = small_model(folder / "model"), folder / "adapters"
        self.output = folder / "output.txt"
        self.adapters.mkdir()
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client()
        self._log_from = 0

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts a process, which may end at once. The system chooses its port."""
        kept = ("--checkpoint-dir", str(self.run / "kept"), "--prefix-cache-dir", str(self.run / "prefixes"))
        logs = ("--audit-log", str(self.run / "audit.log"), "--trajectory-log", str(self.run / "trajectories.jsonl"))
        where = ("--port", "0", "--adapter-dir", str(self.adapters), "--model-path", str(self.model))
        learning = ("--enable-rl-training", *COMMON, *BY_REQUEST)
        environment = {**os.environ, **_NO_ROLLBACK, **self.disk.environment}
        command = [sys.executable, "-m", "mlx_parallm", "serve", *learning, *kept, *logs, *where, *OTHERS, *self._flags]
        with self.output.open("ab") as output:
            self._log_from = output.tell()
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        return self.process

    def wait_until_ready(self) -> bool:
        """Returns false if the process ends before it answers."""
        assert self.process is not None
        until = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < until:
            if found := _URL.search(self.output.read_bytes()[self._log_from :]):
                self.http = httpx.Client(base_url=found[1].decode(), timeout=ANSWER_S)
                return True
            time.sleep(0.05)
        return False

    def start(self) -> None:
        self.launch()
        if not self.wait_until_ready():
            raise SystemExit(f"the server did not start; see {self.output}")

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """The end of what the servers have written to their terminals."""
        return self.output.read_text(errors="replace")[-4000:]


@dataclass
class Client:
    """Uses a server. `refused`: how often the disk's fault was answered; `warned`: how often in an answer's warning."""

    server: Server
    acknowledged: kept.Acknowledged = field(default_factory=kept.Acknowledged)
    rounds: int = 0
    refused: int = 0
    warned: int = 0

    def round(self) -> None:
        """One of each. Raises WrongAnswerError."""
        self.rounds += 1
        for step in (self.collect, self._update, self._save, self._load, self._pause):
            if step():
                continue
            self.refused += 1
            self.answer()

    def answer(self) -> None:
        """A completion that needs no disk, which must always succeed."""
        self._ask("/v1/completions", {"prompt": f"{self.rounds} " + "a b c d " * 40, "max_tokens": 2}, needs_disk=False)

    def resume(self) -> None:
        """What the operator does when the disk is well again."""
        self._ask("/v1/training/resume", {}, needs_disk=False)

    def _ask(self, path: str, body: dict[str, Any], needs_disk: bool = True) -> Any:
        """The answer, or None if it says that the disk failed."""
        answer = self.server.http.post(path, json=body)
        if answer.status_code == 200:
            return answer.json()
        if needs_disk and answer.status_code == STORAGE_FAILED:
            return None
        raise WrongAnswerError(f"{path}: {answer.status_code} {answer.text}")

    def collect(self) -> bool:
        """Collects two answers and rewards them. Returns false if the disk's fault was told."""
        body = {"prompt": f"{self.rounds} and", "n": 2, "max_tokens": 3, "collect_trajectory": True}
        answer = self._ask("/v1/completions", body, needs_disk=False)
        if "not be trained on" in answer.get("trajectory_warning", ""):
            self.warned += 1
            return False
        self.acknowledged.journal.collected.update(answer["trajectory_ids"])
        written = True
        for score, trajectory_id in enumerate(answer["trajectory_ids"]):
            if self._ask("/v1/training/feedback", {"trajectory_id": trajectory_id, "score": score}):
                self.acknowledged.journal.feedback[trajectory_id] = float(score)
            else:
                written = False
        return written

    def _update(self) -> bool:
        turns = [{"prompt_token_ids": [5, 6], "completion_token_ids": [8 + one, 2], "reward": one} for one in (0, 1)]
        body = {"trajectories": [{**turn, "group_id": "a"} for turn in turns]}
        report = self._ask("/v1/training/update", body if self.rounds % 2 else {})
        if report:
            self.acknowledged.journal.step = max(self.acknowledged.journal.step, report["step"])
        return report is not None

    def _save(self) -> bool:
        tag = f"t{self.rounds % 5}"
        self.acknowledged.tags.pop(tag, None)  # it may have moved although the answer was lost
        saved = self._ask("/training/checkpoint", {"checkpoint_name": tag})
        if saved:
            self.acknowledged.tags[tag] = saved["step"]
            self._make_adapter(self.server.run / "kept" / "default" / saved["name"])
        return saved is not None

    def _make_adapter(self, checkpoint: Path) -> None:
        tone = self.server.adapters / "tone"
        tone.mkdir(exist_ok=True)
        for name in _ADAPTER_FILES:
            shutil.copy(checkpoint / name, tone / name)

    def _load(self) -> bool:
        if not (self.server.adapters / "tone").exists():
            return True
        loaded = self._ask("/v1/load_lora_adapter", {"lora_name": "tone", "lora_path": "tone", "load_inplace": True})
        if loaded:
            self.acknowledged.loaded = int(loaded["lora_adapter"].partition("@")[2])
        return loaded is not None

    def _pause(self) -> bool:
        self._ask("/v1/training/pause", {}, needs_disk=False)
        self._ask("/v1/training/resume", {}, needs_disk=False)
        return True

    def lost(self, torn: bool = False) -> list[str]:
        """What a server that was started again does not have of what was acknowledged. `torn`: see `kept.lost`."""
        found = kept.lost(self.server.run, self.acknowledged, torn)
        if (step := self.server.http.get("/v1/training/status").json()["step"]) < self.acknowledged.journal.step:
            found.append(f"step {self.acknowledged.journal.step}, at {step}")
        tone = {"model": "tone", "prompt": "a", "max_tokens": 1}
        answer = self.server.http.post("/v1/completions", json=tone).json() if self.acknowledged.loaded else {}
        live = int(answer.get("lora_adapter", "@0").partition("@")[2])
        return found + [f"tone@{self.acknowledged.loaded}: {live} is live"] * (live < self.acknowledged.loaded)


@contextmanager
def running(server: Server) -> Iterator[Client]:
    """A client of a server that is started, and killed at the end."""
    server.start()
    try:
        yield Client(server)
    finally:
        server.kill()
