"""schemathesis over every route of a disposable server: no 5xx, and nothing that the OpenAPI document does not say.

    mlx_parallm_serve --port 8000 --model-path DIR --enable-rl-training --checkpoint-dir DIR --adapter-dir DIR
    python tests/clients/schemathesis_run.py http://127.0.0.1:8000

It publishes, trains, saves and forgets: never point it at a server that is used. It also asks for answers as long as
the context, so the model should be tiny. What stops requests comes last, each with what starts them again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence

PACKAGE = "schemathesis>=4.32,<5"
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

STOPPING = "^/(pause|resume|is_paused|sleep|wake_up|is_sleeping)$"
ENDLESS = "^/v1/training/events$"
REQUEST_S = 120
PHASES = "examples,coverage,fuzzing"


def passes() -> Iterator[tuple[str, ...]]:
    """Each run's own options, in order."""
    yield ("--exclude-path-regex", f"{STOPPING}|{ENDLESS}")
    yield ("--include-path-regex", "^/(pause|is_paused|resume)$")
    yield ("--include-path-regex", "^/(sleep|is_sleeping|wake_up)$")


def command(url: str, options: Sequence[str], seed: int, examples: int) -> tuple[str, ...]:
    return (
        "run",
        f"{url}/openapi.json",
        "--checks",
        ",".join(CHECKS),
        "--phases",
        PHASES,
        "--max-examples",
        str(examples),
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
    parser.add_argument("--examples", type=int, default=200, help="random requests to each route")
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    given = parser.parse_args()
    commands = (command(given.url, options, given.seed, given.examples) for options in passes())
    return max(subprocess.run((given.schemathesis, *one)).returncode for one in commands)


if __name__ == "__main__":
    sys.exit(main())
