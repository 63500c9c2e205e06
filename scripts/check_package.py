#!/usr/bin/env python3
"""Checks the package as a user gets it: builds it, installs it, and asks its server a question.

    uv run scripts/check_package.py

1. Builds the sdist, and the wheel from the sdist. The sdist holds the whole tree. The wheel holds the package's files,
   whatever their kind, the licence, and nothing of tests/ or benchmarks/.
2. Installs the wheel into an empty environment, which may take `MOST_MB` on disk, as `uvx` would.
3. Runs the self-test of that environment in an empty folder, with tiny models.
4. Starts its `mlx_parallm_serve`, and gets an answer from the bundled model.

Everything is written to a temporary folder outside the tree, so nothing passes because it lies in the working folder.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mlx_parallm"
MOST_MB = 450
START_S, ANSWER_S, STOP_S = 300.0, 120.0, 60.0
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in _OURS and not name.startswith("MLX_PARALLM_")
}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="check_package_") as folder:
        work = Path(folder)
        wheel = build(work / "dist")
        environment = install(wheel, work)
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        check_import(environment, elsewhere)
        check_self_test(environment, elsewhere)
        check_server(environment, elsewhere)


def build(dist: Path) -> Path:
    """Builds both archives, checks what they hold, and returns the wheel."""
    run("uv", "build", "--quiet", "--out-dir", str(dist), str(ROOT))
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    tree = {name for name in listed if (ROOT / name).is_file()}
    sources = {name for name in tree if PurePosixPath(name).parts[0] == PACKAGE}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    names = {name for name in held if ".dist-info" not in PurePosixPath(name).parts[0]}
    require(names == sources, f"the wheel's files differ from those of {PACKAGE}/: {sorted(names ^ sources)}")
    require(any(name.endswith("licenses/LICENSE") for name in held), "the wheel lacks the licence")
    with tarfile.open(sdist) as archive:
        lacking = tree - {name.partition("/")[2] for name in archive.getnames()}
    require(not lacking, f"the sdist lacks {sorted(lacking)}")
    print(f"built {wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def install(wheel: Path, work: Path) -> Path:
    """Installs the wheel, with the locked versions of its dependencies, into a new environment."""
    environment = work / "environment"
    run("uv", "venv", "--quiet", "--python", sys.executable, str(environment), cwd=work)
    begun = time.monotonic()
    options = ("--constraints", str(ROOT / "requirements.lock"), "--overrides", str(ROOT / "packaging/overrides.txt"))
    run("uv", "pip", "install", "--quiet", "--python", str(environment), *options, str(wheel), cwd=work)
    seconds = time.monotonic() - begun
    size_mb = sum(file.lstat().st_size for file in environment.rglob("*") if file.is_file()) / 2**20
    print(f"installed in {seconds:.0f} s: {size_mb:.0f} MiB")
    require(size_mb <= MOST_MB, f"an installation takes {size_mb:.0f} MiB; at most {MOST_MB} are allowed")
    return environment


def check_import(environment: Path, folder: Path) -> None:
    """The package that is imported is the installed one."""
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    file = run(str(environment / "bin/python"), "-c", code, cwd=folder).strip()
    require(Path(file).is_relative_to(environment), f"{PACKAGE} was imported from {file}")


def check_self_test(environment: Path, folder: Path) -> None:
    """Every path of the installed engine gives what mlx-lm's own forward pass gives."""
    begun = time.monotonic()
    command = [str(environment / "bin/mlx_parallm"), "doctor", "--self-test", "--only-tiny"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"the self-test failed:\n{done.stdout}{done.stderr}")
    print(f"self-test passed in {time.monotonic() - begun:.1f} s")


def check_server(environment: Path, folder: Path) -> None:
    """The installed server starts, answers a chat and ends by SIGTERM with exit status 0."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / "server.log"
    begun = time.monotonic()
    with log.open("w") as output:
        command = [str(environment / "bin/mlx_parallm_serve"), "--port", str(port)]
        server = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(server, port)
        started = time.monotonic()
        text = ask(port, "What is the capital of France?")
        print(f"started in {started - begun:.1f} s, answered in {time.monotonic() - started:.1f} s: {text}")
        require("Paris" in text, f"the answer is {text!r}")
        server.send_signal(signal.SIGTERM)
        status = server.wait(STOP_S)
        require(status == 0, f"the server ended with {status}")
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        server.kill()
        server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        require(server.poll() is None, f"the server ended with {server.returncode}")
        try:
            if request(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server did not answer within {START_S:.0f} s")


def ask(port: int, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
    status, answer = request(port, "POST", "/v1/chat/completions", body)
    require(status == 200, f"the server answered {status}: {answer}")
    return str(json.loads(answer)["choices"][0]["message"]["content"])


def request(port: int, method: str, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def run(*command: str, cwd: Path | None = None) -> str:
    """The command's stdout. Its stderr is shown, and a failure ends the check."""
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SystemExit(message)


if __name__ == "__main__":
    main()
