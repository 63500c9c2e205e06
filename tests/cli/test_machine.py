"""The commands about this machine that other programs read: --json, completion, and pull from a hub."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlx_parallm.cli.main import main

pytestmark = pytest.mark.ci

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"0" * 2048, "notes.pdf": b"not needed"}
COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, `maker/model`."""

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/maker/model/revision/"):
            listed = [{"rfilename": each} for each in FILES]
            self._send(json.dumps({"id": "maker/model", "sha": COMMIT, "siblings": listed}).encode(), body)
        elif path.startswith("/api/models/maker/model/tree/"):
            listed = [{"type": "file", "path": each, "size": len(FILES[each]), "oid": each} for each in FILES]
            self._send(json.dumps(listed).encode(), body)
        elif path.startswith("/maker/model/resolve/") and name in FILES:
            self._send(FILES[name], body, {"etag": f'"{name}"', "x-repo-commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    def _send(self, content, body, headers=()):
        self.send_response(200)
        for name, value in {"content-length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """The environment of a process that has this hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{http.server_port}", "HF_HOME": str(tmp_path)}
        http.shutdown()
        thread.join()


def test_pull_downloads_what_a_server_needs_of_a_model(hub):
    command = [sys.executable, "-m", "mlx_parallm", "pull", "maker/model", "--json"]
    done = subprocess.run(command, env=hub, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    pulled = json.loads(done.stdout)
    assert (pulled["model"], pulled["bytes"]) == ("maker/model", 2048 + len(FILES["config.json"]))
    assert sorted(os.listdir(pulled["where"])) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["bash"], ("--enable-rl-training", "--steps", "--replace", "--only-tiny")),
        (["zsh", "--program", "mlx_parallm_train"], ("--prompts-per-step",)),
        (["zsh", "--program", "mlx_parallm_serve"], ("--max-batch-size",)),
        (["tcsh", "--program", "mlx_parallm_serve"], ("max-batch-size",)),
    ],
)
def test_completion_knows_the_flags_of_every_command(argv, flags, capsys):
    assert main(["completion", *argv]) == 0
    script = capsys.readouterr().out
    assert [flag for flag in flags if flag not in script] == []


def test_bash_completes_commands_and_flags(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "complete.sh"
    script.write_text(capsys.readouterr().out)
    asked = f"""
        source {script}
        COMP_WORDS=(mlx_parallm training p) COMP_CWORD=2
        $(complete -p mlx_parallm | sed 's/.*-F \\([^ ]*\\).*/\\1/') mlx_parallm p training
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.split() == ["pause"], done.stderr
