"""`mlx_parallm top`: a live view of a server in the terminal.

ServerReader   asks the server once a second, and listens to its training events on a thread
top_view       makes the view of what was read
Keys           what is typed meanwhile
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from mlx_parallm.cli.remote.client import TIMEOUT_S, Client, add_request_arguments
from mlx_parallm.cli.remote.top_view import Reading, view
from mlx_parallm.cli.table import show
from mlx_parallm.errors import ConfigError, ParaLLMError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

MAX_EVENTS = 6
_QUIT, _PAUSE = "q", "p"
_HELP = "q quits, p pauses or resumes training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--once", action="store_true", help="Print the view once. So it is without a terminal, too.")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS", help="Default: 1.")
    add_request_arguments(parser, top)


def top(args: Namespace) -> int:
    """Shows the view until q is typed, or once."""
    from rich.console import Console

    client, console = Client(args), Console(highlight=False)
    reader = ServerReader(client)
    reader.read()
    if args.json:
        return show(args, reader.reading.as_json(), str)
    if args.once or not console.is_terminal:
        console.print(view(reader.reading, console.width))
        return 0
    return _live(reader, args.interval, console)


def _live(reader: ServerReader, interval_s: float, console: Console) -> int:
    from rich.live import Live

    with Keys.of_terminal() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        if reader.reading.may_train:
            threading.Thread(target=reader.listen, name="events", daemon=True).start()
        while True:
            live.update(view(reader.reading, console.width, keys=_HELP), refresh=True)
            key = keys.wait(interval_s)
            if key == _QUIT:
                return 0
            if key == _PAUSE:
                reader.toggle_training()
            reader.refresh()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.1 to 3600, got {text!r}")
    return seconds


@dataclass(slots=True)
class ServerReader:
    """Reads what the view shows. `reading`: the newest state; it stays when the server does not answer."""

    client: Client
    reading: Reading = field(init=False)
    _refused: str = ""
    _events: deque[Mapping[str, Any]] = field(default_factory=partial(deque, maxlen=MAX_EVENTS))

    def __post_init__(self) -> None:
        self.reading = Reading(self.client.base)

    def refresh(self) -> None:
        """Reads again. If nothing answers, the view says since when.

        Raises:
            ConfigError: the server refuses the key.
        """
        try:
            self.read()
        except ConfigError:
            raise
        except ParaLLMError as error:
            self.reading.lost(str(error), time.time())

    def read(self) -> None:
        """Reads the state of the server. Raises what `Client.ask` does."""
        stats = self.client.ask(f"/v1/stats?after={self.reading.last_interval}")
        with self.client.reading():
            if self.reading.take(stats):
                stats = self.client.ask("/v1/stats")  # the numbers of its intervals have begun again
                self.reading.take(stats)
            self.reading.adapters = self.client.ask("/v1/adapters")["data"]
            trained = [each["name"] for each in stats["training"]["adapters"]] if self.reading.may_train else []
            self.reading.training = {name: self._training(name) for name in trained}
        self.reading.events, self.reading.events_refused = tuple(self._events), self._refused

    def _training(self, adapter: str) -> Any:
        return self.client.ask(f"/v1/training/status?{urlencode({'lora_adapter': adapter})}")

    def toggle_training(self) -> None:
        """Pauses the training of all adapters or, if one is paused, resumes it. What the server refuses is shown."""
        paused = [name for name, status in self.reading.training.items() if status["state"] == "paused"]
        action = "resume" if paused else "pause"
        try:
            for name in paused or self.reading.training:
                self.client.ask(f"/v1/training/{action}", {"lora_adapter": name})
        except ParaLLMError as error:
            self.reading.note = str(error)

    def listen(self) -> None:
        """Keeps the newest training events. Begins again when the stream ends, and never returns. What the server
        refuses is shown in its own words."""
        import httpx

        while True:
            try:
                url, timeout = f"{self.client.base}/v1/training/events", httpx.Timeout(TIMEOUT_S, read=60.0)
                with httpx.stream("GET", url, headers=self.client.headers, timeout=timeout) as response:
                    self._take_events(response)
            except ParaLLMError as error:
                self._refused = str(error)
            except (httpx.HTTPError, ValueError):
                pass  # the view says whether the server answers
            time.sleep(2.0)

    def _take_events(self, response: httpx.Response) -> None:
        """Reads a stream to its end. Raises what `Client.check` does."""
        if not response.is_success:
            response.read()
            self.client.check(response)
        self._refused = ""
        for line in response.iter_lines():
            if line.startswith("data:"):
                self._events.append(json.loads(line.removeprefix("data:")))


class Keys:
    """Keys that are typed, one at a time and without Enter. `descriptor`: of the terminal; None: nothing is read."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def of_terminal(cls) -> Iterator[Keys]:
        """Those of stdin, if it is a terminal, which is as before after the block."""
        if not sys.stdin.isatty():
            yield cls(None)
            return
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)
        try:
            yield cls(descriptor)
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def wait(self, seconds: float) -> str:
        """The next key; empty if none is typed in this time."""
        if self._descriptor is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        return os.read(self._descriptor, 1).decode("ascii", "replace").lower() if ready else ""
