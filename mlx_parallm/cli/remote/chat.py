"""`mlx_parallm chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.remote.client import Client, add_server_arguments
from mlx_parallm.errors import ConfigError, ParaLLMError

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_parallm.cli.remote.conversation import AdapterChat

_QUOTES = '"""'
_HELP = f"""\
/adapter NAME [NAME]  go on with this adapter, or with two side by side; "base" is the base model
/system TEXT          the system message; without TEXT: none
/set NAME VALUE       a field of the requests, such as temperature, top_p, max_tokens or seed
/retry                answer the last question again
/clear                forget what was said
/good, /bad           reward the last answer with 1 or 0; needs --collect
/save FILE            write what was said
/help                 this list
/quit                 end; Ctrl-D does too, and Ctrl-C ends an answer
{_QUOTES} begins and ends a text of several lines."""
_NUMBERS: Mapping[str, Callable[[str], float]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("top_k", "max_tokens", "seed"), int),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    adapters = 'The adapter that answers, or two that answer side by side. "base" is the base model.'
    add("--adapter", nargs="+", default=[None], metavar="NAME", help=f"{adapters} Default: the server's choice.")
    add("--system", default="", metavar="TEXT", help="The system message. Default: none.")
    add("--temperature", type=float, metavar="NUMBER", help="Default: the server's.")
    add("--max-tokens", type=int, metavar="TOKENS", help="Longest answer. Default: as long as the context allows.")
    add("--collect", action="store_true", help="Collect the answers for training; /good and /bad reward them.")
    add_server_arguments(parser)
    parser.set_defaults(run=chat)


def chat(args: Namespace) -> int:
    """Talks with a server. Text that is piped in is one question.

    Raises:
        ConfigError: more than two adapters are named; see also `Client`.
        ParaLLMError: the answer to what was piped in failed; see also `Client`.
    """
    from rich.console import Console

    from mlx_parallm.cli.remote.conversation import AdapterChat

    client, console = Client(args), Console(highlight=False)
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    given: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    collected = {"collect_trajectory": True} if args.collect else {}
    talk = AdapterChat(client, _checked(args.adapter), args.system, given | collected)
    if not sys.stdin.isatty():
        talk.ask(sys.stdin.read().strip(), console)
        return 0
    models = client.ask("/v1/models")
    with client.reading():
        console.print(f"{models['data'][0]['id']} at {client.base}; /help lists the commands", markup=False)
    _Session(talk, console).run()
    return 0


def _checked(adapters: list[str | None]) -> list[str | None]:
    if len(adapters) > 2:
        raise ConfigError("--adapter: name one adapter, or two to see them side by side")
    return adapters


class _Session:
    """Reads lines until the user ends the conversation. An error ends the line that made it."""

    def __init__(self, talk: AdapterChat, console: Console) -> None:
        self._talk = talk
        self._console = console
        self._commands: Mapping[str, Callable[[str], None]] = {
            "adapter": self._adapter,
            "system": self._system,
            "set": self._set,
            "retry": self._retry,
            "clear": lambda _: talk.clear(),
            "good": lambda _: self._reward(1.0),
            "bad": lambda _: self._reward(0.0),
            "save": self._save,
            "help": lambda _: self._print(_HELP),
        }

    def run(self) -> None:
        with suppress(ImportError):  # it gives `input` a history and line editing
            import readline  # noqa: F401
        while (line := self._read()) is not None:
            try:
                self._handle(line)
            except ParaLLMError as error:
                self._print(f"error: {error}")
            except KeyboardInterrupt:
                self._print("\n(interrupted)")

    def _read(self) -> str | None:
        """The next line, or the text between two `_QUOTES`; None at the end."""
        try:
            line = input("> ").strip()
            if not line.startswith(_QUOTES):
                return None if line in ("/quit", "/exit") else line
            text = line.removeprefix(_QUOTES)
            while not text.endswith(_QUOTES):
                text += f"\n{input('. ')}"
            return text.removesuffix(_QUOTES).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._print("")
            return ""

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            name, _, argument = line[1:].partition(" ")
            if name not in self._commands:
                raise ParaLLMError(f"/{name} is no command; /help lists them")
            self._commands[name](argument.strip())
        elif line:
            self._talk.ask(line, self._console)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    # -- commands --------------------------------------------------------------------------------

    def _adapter(self, names: str) -> None:
        self._talk.choose(_checked([*names.split()] or [None]))
        self._print(" and ".join(side.name for side in self._talk.sides))

    def _system(self, text: str) -> None:
        self._talk.system = text

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name not in _NUMBERS:
            raise ParaLLMError(f"/set: name one of {', '.join(_NUMBERS)}, and a number")
        try:
            self._talk.options[name] = _NUMBERS[name](value)
        except ValueError as error:
            raise ParaLLMError(f"/set {name}: {value!r} is no number that it can have") from error

    def _retry(self, _: str) -> None:
        question = self._talk.take_back()
        if question is None:
            raise ParaLLMError("/retry: nothing was asked yet")
        self._talk.ask(question, self._console)

    def _reward(self, score: float) -> None:
        ids = [side.trajectory_id for side in self._talk.sides if side.trajectory_id is not None]
        if not ids:
            raise ParaLLMError("no answer to reward; start with --collect, on a server with --enable-rl-training")
        for trajectory_id in ids:
            self._talk.client.ask("/v1/training/feedback", {"trajectory_id": trajectory_id, "score": score})
        self._print(f"rewarded with {score:g}")

    def _save(self, name: str) -> None:
        if not name:
            raise ParaLLMError("/save: name a file")
        lines = [f"# {side.name}\n\n" + _written(side.messages) for side in self._talk.sides]
        try:
            Path(name).expanduser().write_text("\n".join(lines), encoding="utf-8")
        except OSError as error:
            raise ParaLLMError(f"/save: {name} cannot be written: {error.strerror}") from error
        self._print(f"wrote {name}")


def _written(messages: list[dict[str, str]]) -> str:
    return "".join(f"{message['role']}: {message['content']}\n\n" for message in messages)
