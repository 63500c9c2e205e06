"""An environment of Atropos teaches the bundled model to answer with numbers, in one command.

uv run python examples/protocols/atropos/train.py              this server is the trajectory API too
uv run python examples/protocols/atropos/train.py --run-api    Atropos' own API is a process more
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

sys.path.append(str(Path(__file__).parents[1]))
from serving import post, served, show

ENVIRONMENT = Path(__file__).with_name("environment.py")
RUN_API = ("uv", "tool", "run", "--from", "atroposlib==0.4.0", "run-api", "--host", "127.0.0.1", "--port")
UPDATES, LIMIT_S = 16, 1500


@contextmanager
def running(*command: str) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def watch(url: str) -> None:
    """Shows the mean reward of each update."""
    shown, end = 0, time.monotonic() + LIMIT_S
    while shown < UPDATES:
        status = httpx.get(f"{url}/v1/training/status").json()
        if status["updates_total"] > shown and status["reward_mean"] is not None:
            shown = status["updates_total"]
            show(shown, status["reward_mean"])
        if time.monotonic() > end:
            raise SystemExit(f"{shown} updates in {LIMIT_S} seconds: is the environment running?")
        time.sleep(0.2)


def main() -> None:
    with_run_api = "--run-api" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--run-api"]
    with ExitStack() as ends:
        flags = ["--atropos-api"]
        api = ""
        if with_run_api:
            port = free_port()
            api = f"http://127.0.0.1:{port}"
            ends.enter_context(running(*RUN_API, str(port)))
            flags = ["--atropos-url", api]
        url = ends.enter_context(served("--update-frequency", "32", *flags))
        folder = ends.enter_context(tempfile.TemporaryDirectory()) + "/tokenizer"
        subprocess.run([sys.executable, "-m", "mlx_parallm", "tokenizer", "save", folder], check=True)
        settings = {
            "env.tokenizer_name": folder,
            "env.rollout_server_url": api or url,
            "env.max_batches_offpolicy": "1",
            "openai.model_name": folder,
            "openai.base_url": f"{url}/v1",
        }
        given = [part for name, value in settings.items() for part in (f"--{name}", value)]
        ends.enter_context(running("uv", "run", "--script", str(ENVIRONMENT), "serve", *given))
        post(f"{url}/v1/training/resume")
        watch(url)


if __name__ == "__main__":
    main()
