"""Supervisor: starts the server, listens to it, kills it when it hangs, and starts it again."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType

from pydantic import TypeAdapter

from mlx_parallm import logs
from mlx_parallm.adapters.runs import new_run
from mlx_parallm.config import KEYS, Config
from mlx_parallm.extras.supervise import VARIABLE, Beginning, Report

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TICK_S = 1.0
_STARTING_S = 3600.0
"""A server that starts or ends may be silent for so long in any case, in seconds."""
_QUICK_S, _MOST_QUICK = 60.0, 5
"""A server that has served for less than so many seconds has failed at once; after so many in a row, it is given up."""
_LONGEST_PAUSE_S = 30.0
_STACKS_S = 1.0
"""Seconds that a server gets to print the stacks of its threads."""
_BEGINNING, _REPORT = TypeAdapter(Beginning), TypeAdapter(Report)

_log = logging.getLogger(__name__)


def supervise(config: Config) -> int:
    """Runs the command of this process as a child, until it ends as it was asked to or is given up. Returns its exit
    status."""
    logs.set_up(config.server.log_level, config.server.log_format == "json")
    os.environ.update(run_folder(config))
    return Supervisor((sys.executable, *sys.orig_argv[1:]), config.server.device_timeout).run()


def run_folder(config: Config) -> dict[str, str]:
    """The environment variable by which all servers have the folder of the first one's run, if the configuration names
    none."""
    kept = config.checkpointing
    if not config.rl_training.enabled or kept.checkpoint_dir is not None or kept.resume:
        return {}
    return {KEYS["checkpointing.checkpoint_dir"].env_name: str(new_run())}


class Supervisor:
    """Supervises one server. Main thread only.

    Args:
        command: of the server.
        limit_s: seconds without a sign of life after which it is killed. None: it may be silent for ever. They are
            counted, not read off a clock, so the machine may sleep.
    """

    def __init__(self, command: Sequence[str], limit_s: float | None) -> None:
        self._command = command
        self._limit_s = limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = threading.Event()  # a signal has asked for the end
        self._beginning, self._report = Beginning(), Report(ends="")
        self._served_at: float | None = None

    def run(self) -> int:
        """Returns the exit status of the last server. A signal that it did not handle ends this process, too."""
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._pass_on)
        quick, has_served = 0, False
        while True:
            reason, status = self._serve()
            has_served |= self._served_at is not None
            seconds = 0.0 if self._served_at is None else time.monotonic() - self._served_at
            quick = 0 if seconds >= _QUICK_S else quick + 1
            if status == 0 or not has_served or self._asked.is_set():
                return _as(status)
            if quick > _MOST_QUICK:
                _log.critical("the server %s, and has failed at once %d times in a row: it is given up", reason, quick)
                return _as(status)
            _log.error("the server %s; it is started again", reason)
            self._beginning = Beginning(self._beginning.restarts + 1, reason, self._report.changes)
            if self._asked.wait(min(2.0 ** (quick - 2), _LONGEST_PAUSE_S) if quick > 1 else 0.0):
                return _as(status)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()
        if self._child is not None:
            self._child.send_signal(number)

    def _serve(self) -> tuple[str, int]:
        """Runs one server to its end. Returns how it has ended, in words, and its exit status."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:  # in a process group of its own: Ctrl-C must come once, from here
                number, self._served_at = theirs.fileno(), None
                environment = {**os.environ, VARIABLE: str(number)}
                self._child = subprocess.Popen(self._command, env=environment, pass_fds=(number,), process_group=0)
            if self._asked.is_set():  # just before
                self._child.terminate()
            threading.Thread(target=self._begin, args=(ours,), daemon=True).start()
            silent_s = self._listen(ours)
            if silent_s is not None:
                self._kill(self._child)
            status = self._child.wait()
        if silent_s is not None:
            return f"gave no sign of life for {silent_s:.0f} s", status
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{how} ({self._report.ends})" if self._report.ends else how, status

    def _begin(self, to: socket.socket) -> None:
        """Tells a server how it begins. It reads that when it has loaded its model, so this may wait."""
        with suppress(OSError):
            to.sendall(_BEGINNING.dump_json(self._beginning) + b"\n")

    def _listen(self, server: socket.socket) -> float | None:
        """Listens until the server has ended; then returns None. If it hangs, returns for how long it was silent."""
        self._report, silent_s, rest = replace(self._report, ends=""), 0.0, b""
        while True:
            if not select.select([server], [], [], _TICK_S)[0]:
                silent_s += _TICK_S
                least_s = 0.0 if self._report.ends is None else _STARTING_S
                if self._limit_s is not None and silent_s >= max(self._limit_s, least_s):
                    return silent_s
                continue
            data = b""
            with suppress(ConnectionError):  # it has ended without reading all
                data = server.recv(1 << 16)
            if not data:
                return None
            silent_s = 0.0
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                self._report = _REPORT.validate_json(line)
                if self._served_at is None:
                    self._served_at = time.monotonic()

    def _kill(self, server: subprocess.Popen[bytes]) -> None:
        """Kills a server that hangs. It prints the stacks of its threads before."""
        _log.critical("the server gives no sign of life, and is killed")
        server.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)
        server.kill()


def _as(status: int) -> int:
    """The exit status of a process that ends as its child has."""
    if status < 0 and -status in _SIGNALS:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status if status >= 0 else 128 - status
