"""A server for the examples of this folder, and the curve that they print."""

import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

WAIT_S = 120
LEARNS = ("--enable-rl-training", "--learning-rate", "1e-3")


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """The URL of a server that trains: the one that the command line names, or one on the bundled model that runs while
    the block does, with more `flags`. Its run is not kept."""
    if len(sys.argv) > 1:
        yield sys.argv[1].rstrip("/")
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the server ends with the program
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "-m", "mlx_parallm", "serve", "--port", str(port), "--checkpoint-dir", f"{run}/run"]
        with subprocess.Popen([*command, *LEARNS, *flags], stderr=subprocess.DEVNULL) as server:
            try:
                url = f"http://127.0.0.1:{port}"
                _wait(url, server)
                post(f"{url}/v1/training/pause")  # the program says when to update, and the server does not by itself
                yield url
            finally:
                server.terminate()


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(WAIT_S):
        if server.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise SystemExit("the server did not start: try `mlx_parallm_serve --enable-rl-training`")


def post(url: str, **body: object) -> dict:
    answer = httpx.post(url, json=body, timeout=600)
    if answer.is_error:
        raise SystemExit(f"{url} answers {answer.text}")
    return answer.json()


def show(step: int, reward: float) -> None:
    """One line of the curve; rewards are from 0 to 1."""
    print(f"update {step}: reward {reward:.3f} {'█' * round(40 * reward)}", flush=True)
