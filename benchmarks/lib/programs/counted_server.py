"""`mlx_parallm_serve`, which counts the objects of its process when it gets SIGUSR1, and writes the counts to a file.
With SIGUSR2, it first looks for those that nothing reaches any more, which stops all threads for a moment.

python counted_server.py COUNTS FLAG …
"""

import gc
import json
import re
import signal
import sys
import threading
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

COUNTS = Path(sys.argv[1])


def count(number: int, _: Any) -> None:
    """Writes how many MLX arrays and how many objects in all Python's garbage collector knows, those of each type,
    and Python's threads by name. Objects that have lived since the start, or since a base model was unloaded, are
    frozen: they count too."""
    gc.unfreeze()
    if number == signal.SIGUSR2:
        gc.collect()
    # One call of C code: while another thread runs, nothing may hold a tuple that it is still making.
    every = chain.from_iterable(map(gc.get_objects, (None,)))
    types = Counter(
        {f"{kind.__module__}.{kind.__qualname__}": many for kind, many in Counter(map(type, every)).items()}
    )
    threads = Counter(re.sub(r"[-_ ]*\d+$", "", thread.name) for thread in threading.enumerate())
    found = {
        "arrays": types["mlx.core.array"],
        "objects": types.total(),
        "types": types,
        "threads": threads,
    }
    gc.freeze()
    written = COUNTS.with_suffix(".tmp")
    written.write_text(json.dumps(found))
    written.replace(COUNTS)


if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, count)
    from mlx_parallm.cli.main import serve

    sys.argv = ["mlx_parallm_serve", *sys.argv[2:]]
    sys.exit(serve())
