"""schemathesis over every route of a disposable server: no 5xx, and nothing that the OpenAPI document does not say.

    mlx_parallm_serve --port 8000 --enable-rl-training --checkpoint-dir DIR --adapter-dir DIR
    python tests/clients/schemathesis_run.py http://127.0.0.1:8000

It publishes, trains, saves and forgets: never point it at a server that is used. What stops requests comes last, each
with what starts them again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = "schemathesis>=4.32,<5"
HOOKS = Path(__file__).parent / "scripts" / "schemathesis_hooks.py"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
"""Not those of which data are taken: many bodies are well formed, and ask for things that exclude each other."""

GENERATING = "^/v1/(completions|chat/completions|responses|training/update)$"
STOPPING = "^/(pause|resume|is_paused|sleep|wake_up|is_sleeping)$"
ENDLESS = "^/v1/training/events$"
FEW, MANY = 30, 200
REQUEST_S = 120
ALL_PHASES = "examples,coverage,fuzzing"
DRAWN_PHASES = "examples,fuzzing"
"""Without the hundreds of bodies at the bounds of a field, most of which would be generated for."""


def passes() -> Iterator[tuple[str, ...]]:
    """Each run's own options, in order."""
    many = ("--phases", ALL_PHASES, "--max-examples", str(MANY))
    yield (*many, "--exclude-path-regex", f"{GENERATING}|{STOPPING}|{ENDLESS}")
    yield ("--phases", DRAWN_PHASES, "--max-examples", str(FEW), "--include-path-regex", GENERATING)
    yield (*many, "--include-path-regex", "^/(pause|is_paused|resume)$")
    yield (*many, "--include-path-regex", "^/(sleep|is_sleeping|wake_up)$")


def command(url: str, options: Sequence[str], seed: int) -> tuple[str, ...]:
    return (
        "run",
        f"{url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        "--seed",
        str(seed),
        "--request-timeout",
        str(REQUEST_S),
        "--generation-database",
        "none",
        "--warnings",
        "off",
        "--no-color",
        *options,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a disposable server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    given = parser.parse_args()
    environment = os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)}
    ends = [
        subprocess.run((given.schemathesis, *command(given.url, options, given.seed)), env=environment).returncode
        for options in passes()
    ]
    return max(ends)


if __name__ == "__main__":
    sys.exit(main())
