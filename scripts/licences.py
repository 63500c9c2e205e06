#!/usr/bin/env python3
"""Lists the licences of what the package and its extras need, and fails if one is not in `ALLOWED`.

    uv run --no-sync scripts/licences.py             # as far as it is installed in this environment
    uv run --no-sync scripts/licences.py --json      # lists of name, version, licence

What the dashboard bundles is not Python: its licences are in mlx_parallm/server/dashboard/built/assets/licenses-*.txt.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "mlx-parallm"
ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU",
    "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
"""Names of SPDX. Each lets anybody use and pass on a program that needs the package. The MPL asks for the source of its
own files, which PyPI has."""
OLD_NAMES = {
    r"Apache( Software)?( License)?,?( Version)?( 2\.0)?( License)?": "Apache-2.0",
    r"(3-Clause )?BSD( 3-Clause)?( License)?": "BSD-3-Clause",
    r"ISC License( \(ISCL\))?": "ISC",
    r"MIT License": "MIT",
    r"Mozilla Public License 2\.0 \(MPL 2\.0\)": "MPL-2.0",
    r"Python Software Foundation License": "PSF-2.0",
}
"""As packages without an SPDX expression name them, as patterns."""
ELSEWHERE = {
    "openai-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
    "protobuf-py-ext": "Apache-2.0",
    "zss": "BSD-3-Clause",
}
"""Packages whose metadata name no licence; a file of theirs or their repository does."""


def main() -> None:
    distributions = [*needed(NAME)]
    found = {each.name: licence(each) for each in distributions}
    if "--json" in sys.argv:
        versions = {each.name: each.version for each in distributions}
        print(json.dumps([(canonicalize_name(name), versions[name], found[name]) for name in found]))
        return
    for name, text in sorted(found.items(), key=lambda each: each[0].lower()):
        print(f"{name:40} {text}")
    if refused := sorted(name for name, text in found.items() if not allowed(text)):
        raise SystemExit(f"their licences are not in ALLOWED of {sys.argv[0]}: {', '.join(refused)}")


def needed(name: str) -> Iterator[metadata.Distribution]:
    """What is installed of everything that a package, with all of its extras, needs at run time."""
    extras = ",".join(metadata.metadata(name).get_all("Provides-Extra", ()))
    waiting, seen = [Requirement(f"{name}[{extras}]")], set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:  # of another system, or an extra
            continue
        if key[0] != name:
            yield distribution
        chosen = [{"extra": extra} for extra in ("", *requirement.extras)]
        for each in map(Requirement, distribution.requires or ()):
            if each.marker is None or any(map(each.marker.evaluate, chosen)):
                waiting.append(each)


def licence(distribution: metadata.Distribution) -> str:
    """An SPDX expression, or, for a package that gives none, what it says."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return str(expression)
    named = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier", ()) if text.startswith("License :: ")]
    named = [text for text in named if text not in ("OSI Approved", "DFSG approved")]
    named = named or str(about.get("License", "")).strip().splitlines()[:1]
    named = named or [ELSEWHERE.get(distribution.name, "unknown")]
    return " AND ".join(map(_in_spdx, named))


def _in_spdx(text: str) -> str:
    return next((spdx for pattern, spdx in OLD_NAMES.items() if re.fullmatch(pattern, text)), text)


def allowed(text: str) -> bool:
    """Whether every licence of an expression is in `ALLOWED`."""
    return {*re.split(r"\s+(?:AND|OR)\s+|[()]+", text)} - {""} <= ALLOWED


if __name__ == "__main__":
    main()
