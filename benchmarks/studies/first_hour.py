"""From nothing to a first answer and a first lesson learnt, as a new user: one line of pip or of uv, and one to start.

    python benchmarks/studies/first_hour.py [--installers pip uv] [--burners 0 8] [--minutes 30] [--no-lesson]
        [--out FILE]

The wheels are built first. For each installer and each number of programs that burn a core beside it: an empty
environment is made and the package installed into it by its name, the server started there, a question asked, and the
lesson "say banana" given, which is stopped after --minutes. Packages that the installer has in its cache stay there;
--no-cache downloads all. A quiet machine: 6 minutes for each installer; beside 8 programs, up to 45.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.burning import burning
from benchmarks.lib.load import HOST
from benchmarks.lib.peers import free_port
from benchmarks.lib.training.lessons import LESSONS, ROUTE

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from check_package import build, build_demo

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Hour:
    """`size_mb`: of the environment. Seconds: of the installation; from the start of the server until it
    is healthy and until the first answer; those of the lesson. `rewards`: of the lesson's first and last answers."""

    installer: str
    burners: int
    size_mb: float
    install_s: float
    ready_s: float
    answer_s: float
    lesson_s: float
    outcome: str
    rewards: tuple[float, float]


def main() -> None:
    arguments = _arguments()
    machine.warn_if_busy()
    record = {"machine": machine.describe(), "setting": report.setting(arguments), "hours": []}
    with tempfile.TemporaryDirectory(prefix="first_hour_") as folder:
        dist = Path(folder) / "dist"
        build(dist)
        build_demo(dist)
        hours = []
        for burners in arguments.burners:
            for installer in arguments.installers:
                with burning(burners):
                    work = Path(folder) / f"{installer}-{burners}"
                    work.mkdir()
                    hours.append(_hour(installer, burners, dist, work, arguments))
                print(hours[-1], flush=True)
                record["hours"] = [asdict(hour) for hour in hours]
                if arguments.out:
                    report.write(arguments.out, record, [])
    report.console().print(_table(hours))


def _hour(installer: str, burners: int, dist: Path, work: Path, arguments: argparse.Namespace) -> Hour:
    began = time.monotonic()
    for command in _install(installer, dist, work, arguments.no_cache):
        subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
    install_s = time.monotonic() - began
    size = sum(file.lstat().st_size for file in (work / "env").rglob("*") if file.is_file()) / 2**20
    port = free_port()
    began = time.monotonic()
    command = ("env/bin/mlx-parallm", "serve", "--port", str(port), "--enable-rl-training", "--checkpoint-dir", "run")
    with (
        (work / "server.log").open("w") as log,
        subprocess.Popen(command, cwd=work, stdout=log, stderr=log) as server,
        httpx.Client(base_url=f"http://{HOST}:{port}", timeout=600) as http,
    ):
        try:
            _until_healthy(http, server)
            ready_s = time.monotonic() - began
            body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
            assert "Paris" in http.post("/v1/completions", json=body).raise_for_status().text
            answer_s = time.monotonic() - began
            lesson_s, outcome, rewards = (0.0, "", (0.0, 0.0)) if arguments.no_lesson else _lesson(http, arguments)
        finally:
            server.terminate()
    return Hour(installer, burners, size, install_s, ready_s, answer_s, lesson_s, outcome, rewards)


def _install(installer: str, dist: Path, work: Path, no_cache: bool) -> Sequence[tuple[str, ...]]:
    """The commands that make `work`/env."""
    source = ("--find-links", str(dist), "mlx-parallm")
    if installer == "uv":
        install = ("uv", "pip", "install", "--quiet", "--python", "env", *(("--no-cache",) if no_cache else ()))
        return ("uv", "venv", "--quiet", "--python", sys.executable, "env"), (*install, *source)
    install = ("env/bin/python", "-m", "pip", "install", "--quiet", *(("--no-cache-dir",) if no_cache else ()))
    return (sys.executable, "-m", "venv", "env"), (*install, *source)


def _until_healthy(http: httpx.Client, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)
    raise RuntimeError(f"the server ended with {server.returncode}")


def _lesson(http: httpx.Client, arguments: argparse.Namespace) -> tuple[float, str, tuple[float, float]]:
    began = time.monotonic()
    http.post(ROUTE, json=LESSONS["say banana"]).raise_for_status()
    while (now := http.get(ROUTE).json()["lesson"])["state"] != "ended":
        if time.monotonic() - began > 60 * arguments.minutes:
            http.delete(ROUTE).raise_for_status()
            now = http.get(ROUTE).json()["lesson"]
            break
        time.sleep(1)
    points = [point["reward"] for point in now["points"]]
    return time.monotonic() - began, now["outcome"], (points[0], points[-1])


def _table(hours: Sequence[Hour]) -> Table:
    table = Table("installed with", "beside", title="From nothing, in seconds")
    for column in ("MiB", "installed", "ready", "first answer", "lesson", "reward"):
        table.add_column(column, justify="right")
    for hour in hours:
        beside = f"{hour.burners} programs" if hour.burners else "nothing"
        times = (hour.size_mb, hour.install_s, hour.ready_s, hour.answer_s, hour.lesson_s)
        first, last = hour.rewards
        table.add_row(hour.installer, beside, *(f"{value:,.0f}" for value in times), f"{first:.2f} to {last:.2f}")
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installers", nargs="+", choices=("pip", "uv"), default=("pip", "uv"))
    parser.add_argument("--burners", type=int, nargs="+", default=(0, 8))
    parser.add_argument("--minutes", type=float, default=30.0, help="after which a lesson is stopped")
    parser.add_argument("--no-lesson", action="store_true")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
