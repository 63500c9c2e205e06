# /// script
# dependencies = ["playwright==1.65.2"]
# ///
"""Runs one scenario of this folder in a browser, and prints what it saw as JSON.

    run.py SCENARIO '{"url": …, "pictures": FOLDER, …}'

SCENARIO is `module.function`; the function takes the arguments by name.
"""

import json
import sys
from importlib import import_module

module, _, function = sys.argv[1].partition(".")
print(json.dumps(getattr(import_module(module), function)(**json.loads(sys.argv[2]))))
