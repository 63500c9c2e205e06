"""Says how far collecting is. Each worker of xdist imports all tests before the first one runs, which takes half a
minute on two quiet cores and minutes on busy ones, and xdist says nothing meanwhile.

A worker writes how many tests it has into a file of its own. The process that started it reads these files.

What is collected stays, so looking for garbage in it would only take time: a fifth of that of collecting.
"""

import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest

EVERY_S = 5.0
EVERY_TESTS = 100


class Reader:
    """The part of the process that starts the workers. Prints a line at once, and one every `EVERY_S` seconds."""

    def __init__(self, config):
        self._folder = tempfile.TemporaryDirectory()
        self._write_line = config.pluginmanager.getplugin("terminalreporter").write_line
        self._collected = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["collecting"] = self._folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config, specs):
        self._write_line(f"collecting: each of {len(specs)} workers imports all tests first")
        self._thread.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self._collected.set()

    def pytest_unconfigure(self):
        self._collected.set()
        self._folder.cleanup()

    def _run(self):
        while not self._collected.wait(EVERY_S):
            counts = [len(file.read_bytes()) * EVERY_TESTS for file in Path(self._folder.name).iterdir()]
            self._write_line(f"collecting: {min(counts, default=0)} tests")


class Writer:
    """The part of a worker."""

    def __init__(self, config):
        self._count = 0
        path = Path(config.workerinput["collecting"]) / config.workerinput["workerid"]
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def pytest_itemcollected(self, item):
        self._count += 1
        if self._count % EVERY_TESTS == 0:
            os.write(self._file, b".")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if "collecting" in getattr(config, "workerinput", {}):
        config.pluginmanager.register(Writer(config))
    elif config.getoption("numprocesses", None) and config.pluginmanager.hasplugin("terminalreporter"):
        config.pluginmanager.register(Reader(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
