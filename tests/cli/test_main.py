"""The three scripts as a user meets them: flags, exit statuses, messages."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest

import mlx_parallm
from mlx_parallm.cli.flags import FLAGS
from mlx_parallm.cli.main import main, serve, train
from mlx_parallm.config import KEYS
from mlx_parallm.errors import ModelNotFoundError


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for key in KEYS.values():
        monkeypatch.delenv(key.env_name, raising=False)
    monkeypatch.delenv("MLX_PARALLM_API_KEY", raising=False)


@pytest.fixture
def app(monkeypatch):
    """A stand-in for the server: remembers the configuration it was started with."""
    module = ModuleType("mlx_parallm.app")
    module.started = []
    module.run = lambda config: module.started.append(config) or 0
    monkeypatch.setitem(sys.modules, "mlx_parallm.app", module)
    return module


def test_flags_reach_the_server(app, tmp_path, monkeypatch):
    file = tmp_path / "settings.yaml"
    file.write_text("server: {port: 1, host: 127.0.0.2, debug: true}")
    monkeypatch.setenv("MLX_PARALLM_SERVER__HOST", "127.0.0.3")
    argv = ["--config", str(file), "--port", "9000", "--no-debug", "--kv-cache-memory", "1GiB", "--model-path", "m"]
    assert serve(argv) == main(["serve", *argv]) == 0
    first, second = app.started
    assert first == second
    assert (first.server.port, first.server.host, first.server.debug) == (9000, "127.0.0.3", False)
    assert (first.server.kv_cache_memory, first.model.base_model_path) == (2**30, "m")


def test_every_flag_sets_its_own_key(app):
    values = {"--port": "1", "--mode": "inference", "--log-level": "error", "--kv-cache-memory": "1GB"}
    values |= {"--cors-origins": "http://a", "--max-model-len": "5", "--shutdown-timeout": "1"}
    values |= dict.fromkeys(("--max-batch-size", "--max-batched-tokens", "--max-queued"), "7")
    for flag in FLAGS:
        value = [] if flag.key.field.annotation is bool else [values.get(flag.name, "text")]
        assert serve([flag.name, *value]) == 0
    changed = [config.model_dump(exclude_defaults=True) for config in app.started]
    expected = [flag.path for flag in FLAGS if flag.name != "--mode"]
    assert [f"{section}.{key}" for dump in changed for section, keys in dump.items() for key in keys] == expected


def test_print_config_shows_sources_and_no_secret(app, capsys):
    assert serve(["--print-config", "--port", "9000", "--api-key", "s3cret"]) == 0
    printed = capsys.readouterr().out
    assert "port: 9000  # from --port" in printed
    assert "s3cret" not in printed
    assert app.started == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "error: --prot: unknown flag; did you mean --port?"),
        (["--max-batchsize=4"], "error: --max-batchsize: unknown flag; did you mean --max-batch-size?"),
        (["--por", "1"], "error: --por: unknown flag; did you mean --port?"),
        (["--api-kee=s3cret"], "error: --api-kee: unknown flag; did you mean --api-key?"),
        (["8000"], "error: unexpected argument '8000'"),
        (["--port"], "error: argument --port: expected one argument"),
        (["--port", "x"], "error: server.port: must be a valid integer"),
        (["--mode", "rl"], "error: server.mode: not available in this version: training"),
        (["--config", "/nonexistent/x.yaml"], "error: /nonexistent/x.yaml: the configuration file cannot be read"),
    ],
)
def test_wrong_configuration_exits_2_and_says_what_to_change(app, capsys, argv, message):
    assert serve(argv) == 2
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert output.err.count("\n") == 1
    assert "s3cret" not in output.err + output.out
    assert app.started == []


def test_each_problem_is_an_error_line(app, capsys):
    assert serve(["--port", "-1", "--max-queued", "0"]) == 2
    assert [line[:13] for line in capsys.readouterr().err.splitlines()] == ["error: server"] * 2


def test_training_is_refused(app, capsys):
    assert train([]) == 2
    assert "error: server.mode: not available in this version" in capsys.readouterr().err
    assert train(["--mode", "inference"]) == 2
    assert "error: --mode: unknown flag" in capsys.readouterr().err
    assert app.started == []


def test_failures_exit_1_and_interrupts_130_quietly(app, capsys):
    def fail(config):
        raise ModelNotFoundError("no model 'm'; name another with --model-path")

    def interrupt(config):
        raise KeyboardInterrupt

    app.run = fail
    assert serve([]) == 1
    assert capsys.readouterr().err == "error: no model 'm'; name another with --model-path\n"
    app.run = interrupt
    assert serve([]) == 130
    assert capsys.readouterr().err == ""


def test_help_names_every_flag_and_loads_no_model_library():
    code = "import sys; from mlx_parallm.cli.main import main\ntry: main(['serve', '-h'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert [flag.name for flag in FLAGS if flag.name not in done.stdout] == []
    assert not {"mlx", "mlx.core", "transformers", "fastapi", "huggingface_hub"} & set(done.stdout.split())


def test_no_command_prints_help(capsys):
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_version(capsys):
    assert main(["version"]) == 0
    assert f"mlx_parallm {mlx_parallm.__version__}" in capsys.readouterr().out


def test_list_shows_bundled_and_downloaded_models(capsys, monkeypatch):
    def repository(name, kind, size):
        return SimpleNamespace(repo_id=name, repo_type=kind, size_on_disk=size, repo_path=f"/hub/{name}")

    kinds = (("o/zeta", "model", 2**30), ("o/alpha", "model", 5), ("d", "dataset", 9))
    repositories = [repository(*kind) for kind in kinds]
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: SimpleNamespace(repos=repositories))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["SmolLM2-135M-Instruct", "o/alpha", "o/zeta"]
    assert lines[2].split()[1:] == ["1.0", "GiB", "/hub/o/zeta"]


# ---- ps ----------------------------------------------------------------------------------------

STATE = {"engine": {"running": 3, "waiting": 1, "kv_bytes_held": 2**20, "kv_bytes_budget": 2**30}}


@pytest.fixture
def server():
    """A small HTTP server whose answers a test sets: {path: body}; wants the key `k`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = self.headers["Authorization"] == "Bearer k"
            body = self.server.answers.get(self.path, b"") if allowed else b""
            self.send_response(200 if body else 404 if allowed else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.answers = {"/v1/models": b'{"data": [{"id": "m"}]}', "/debug/state": json.dumps(STATE).encode()}
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def test_ps_shows_a_running_server(server, capsys, monkeypatch):
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "k")
    assert main(["ps", "--url", f"{url}/v1/"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        url,
        "  models    m",
        "  running   3",
        "  waiting   1",
        "  KV cache  1.0 MiB of 1.0 GiB",
    ]
    assert main(["ps", "--url", url, "--api-key", "other"]) == 2
    assert "pass --api-key" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b"[]", b""])
def test_ps_refuses_another_server(server, capsys, answer):
    server.answers["/debug/state"] = answer
    assert main(["ps", "--url", f"http://127.0.0.1:{server.server_port}", "--api-key", "k"]) == 1
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:")


def test_ps_says_when_nothing_runs(capsys):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        free = http.server_port
    assert main(["ps", "--url", f"http://127.0.0.1:{free}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: no server answers at http://127.0.0.1:{free}")
    assert main(["ps", "--url", "localhost:8000"]) == 2
