"""The child's side of its pipes."""

from __future__ import annotations

import os
import sys
from typing import BinaryIO


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """What stdin and stdout were: requests and replies. Nobody else can read the one or print into the other:
    stdin is empty from now on, and stdout is stderr. Processes that the child starts do not inherit them.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies
