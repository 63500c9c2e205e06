"""What a configuration needs is checked before the model is loaded, so nothing fails after minutes."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from mlx_parallm.app.serve import IntegratedServer
from mlx_parallm.config import configure
from mlx_parallm.engine.thread import ContinuousBatchProcessor
from mlx_parallm.errors import ConfigError, ModelNotFoundError, ParaLLMError
from mlx_parallm.optional_packages import OTEL

TASKS = {"rl_training__environment": "math.jsonl"}
EVALUATES = {"rl_training__evaluation__every": 1}
TEACHER = {"rl_training__algorithm": "distillation", "rl_training__teacher__prompt": "@none.txt"}
DRAFTS = {"server__speculation": "draft", "model__draft_model": "./none"}


class LoadsError(Exception):
    """The model would be loaded now."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a file of tasks that only the scorer `math` can score, and a device that is not to be started."""

    def start(self: object) -> None:
        raise LoadsError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ContinuousBatchProcessor, "start", start)
    tasks = [{"prompt": f"{n} x?", "answer": f"{n} x"} for n in range(9)]
    Path("math.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    Path("empty.jsonl").write_text("")
    Path("rewards.py").write_text("def score(completion):\n    return 1.0\n")
    Path("file").write_text("")


async def refused(keys: dict[str, object]) -> str:
    """Why a server with this configuration does not start."""
    port = {"server__port": 0, "model__base_model_path": "./model"}
    with pytest.raises(ParaLLMError) as caught:
        await IntegratedServer(configure(**{**port, **keys})).run_inference()
    assert isinstance(caught.value, ConfigError | ModelNotFoundError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"server__keys_file": "none.json"}, "none.json: the file of keys cannot be read"),
        ({"server__keys_file": "file"}, "file: not a file of keys"),
        ({"server__ssl_certfile": "none.pem"}, "the certificate cannot be used"),
        ({"server__audit_log": "file/audit.log"}, "server.audit_log: file/audit.log cannot be written"),
        ({"server__chat_template_dir": "none"}, "none"),
        ({"server__prefix_cache_dir": "file/cache"}, "server.prefix_cache_dir: file/cache cannot be written"),
        ({"debug__trace": "file/trace.json"}, "debug.trace: file/trace.json cannot be written"),
        ({"rl_training__trajectory_log": "file/log"}, "rl_training.trajectory_log: file/log cannot be written"),
        ({"checkpointing__checkpoint_dir": "file/run"}, "checkpoints cannot be kept in file/run"),
        ({"adapters__adapter_dir": "none"}, "none is no folder; make it, or correct --adapter-dir"),
        ({"adapters__serve": "nobody"}, "no adapter or checkpoint is called 'nobody'"),
        (TEACHER, "rl_training.teacher.prompt: none.txt cannot be read"),
        ({"rl_training__system_prompt": "@none.txt"}, "rl_training.system_prompt: none.txt cannot be read"),
        ({"rl_training__environment": "none.jsonl"}, "environment: none.jsonl cannot be read"),
        ({"rl_training__environment": "empty.jsonl"}, "environment: empty.jsonl has no task"),
        ({"rl_training__environment": "tasks.parquet"}, "mlx-parallm[parquet]"),
        ({**TASKS, "rl_training__server_rollouts": True}, "mlx-parallm[math]"),
        ({**TASKS, **EVALUATES}, "mlx-parallm[math]"),
        ({**EVALUATES, "rl_training__evaluation__tasks": "none.jsonl"}, "none.jsonl cannot be read"),
        ({"rl_training__environment": "reasoning_gym:leg_counting", **EVALUATES}, "mlx-parallm[reasoning-gym]"),
        ({"rl_training__environment": "verifiers:mine", **EVALUATES}, "mlx-parallm[verifiers]"),
        ({"rl_training__reward": "none.py:score"}, "reward: "),
        ({"rl_training__reward": "rewards.py:other"}, "reward: "),
        ({"rl_training__reward": "math"}, "mlx-parallm[math]"),
        ({"rl_training__trackers": ("wandb",)}, "rl_training.trackers: wandb: "),
        ({"server__otlp_traces_endpoint": "http://127.0.0.1:1"}, "mlx-parallm[otel]"),
        (DRAFTS, "no model directory at ./none"),
    ],
)
async def test_what_is_missing_is_told_before_the_model_is_loaded(
    keys: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("math_verify", "pyarrow", "reasoning_gym", "verifiers", "wandb", OTEL.module):
        monkeypatch.setitem(sys.modules, module, None)
    assert message in await refused(keys)


async def test_a_port_that_is_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in await refused({"server__port": port})


async def test_what_can_be_used_is_loaded() -> None:
    keys = {"rl_training__reward": "rewards.py:score", "rl_training__trajectory_log": "new/log.jsonl", **EVALUATES}
    config = configure(**TASKS, **keys, server__port=0, server__audit_log="new/audit.log", debug__trace="trace.json")
    with pytest.raises(LoadsError):
        await IntegratedServer(config).run_inference()
