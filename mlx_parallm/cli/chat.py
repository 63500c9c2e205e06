"""`mlx_parallm chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm.cli.client import SERVER, Client
from mlx_parallm.cli.parser import argument, takes
from mlx_parallm.errors import ConfigError, ParaLLMError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console, RenderableType

_QUOTES = '"""'
HELP = f"""\
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


_ADAPTERS = 'The adapter that answers, or two that answer side by side. "base" is the base model.'
_FRAMES_PER_SECOND = 8


@takes(
    argument("--adapter", nargs="+", default=[None], metavar="NAME", help=f"{_ADAPTERS} Default: the server's choice."),
    argument("--system", default="", metavar="TEXT", help="The system message. Default: none."),
    argument("--temperature", type=float, metavar="NUMBER", help="Default: the server's."),
    argument(
        "--max-tokens", type=int, metavar="TOKENS", help="Longest answer. Default: as long as the context allows."
    ),
    argument("--collect", action="store_true", help="Collect the answers for training; /good and /bad reward them."),
    *SERVER,
)
def chat(args: Namespace) -> int:
    """Talks with a server. Text that is piped in is one question.

    Raises:
        ConfigError: more than two adapters are named; see also `Client`.
        ParaLLMError: the answer to what was piped in failed; see also `Client`.
    """
    from rich.console import Console

    client, console = Client(args), Console(highlight=False)
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    given: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    collected = {"collect_trajectory": True} if args.collect else {}
    talk = AdapterChat(client, console, _checked(args.adapter), args.system, given | collected)
    if not sys.stdin.isatty():
        talk.ask(sys.stdin.read().strip())
        return 0
    models = client.ask("/v1/models")
    with client.reading():
        console.print(f"{models['data'][0]['id']} at {client.base}; /help lists the commands", markup=False)
    talk.run()
    return 0


def _checked(adapters: list[str | None]) -> list[str | None]:
    if len(adapters) > 2:
        raise ConfigError("--adapter: name one adapter, or two to see them side by side")
    return adapters


@dataclass(slots=True, eq=False)
class Side:
    """The conversation with one model or adapter.

    Attributes:
        model: the name that requests have; None: the served model.
        messages: pairs of a message of the user and the answer to it.
        answer, reasoning: text of the last answer, as far as it has come.
        trajectory_id: of the last answer, if it was collected.
    """

    model: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    answer: str = ""
    reasoning: str = ""
    trajectory_id: str | None = None

    @property
    def name(self) -> str:
        return self.model or "the served model"

    @property
    def text(self) -> str:
        """What was said, for a file."""
        return f"# {self.name}\n\n" + "".join(f"{each['role']}: {each['content']}\n\n" for each in self.messages)

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Takes a chunk of the answer. Returns the text that it adds, reasoning or not."""
        if ids := chunk.get("trajectory_ids"):
            self.trajectory_id = ids[0]
        added = ""
        for choice in chunk.get("choices") or ():
            delta = choice["delta"]
            reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
            self.reasoning += reasoning
            self.answer += content
            added += reasoning + content
        return added


class AdapterChat:
    """Asks one server the same questions with one adapter, or with two side by side.

    Args:
        models: one or two names that the requests have; None: the served model.
        system: the system message; empty: none.
        options: fields of every request, such as `temperature`.
    """

    def __init__(
        self,
        client: Client,
        console: Console,
        models: Sequence[str | None],
        system: str,
        options: Mapping[str, object],
    ) -> None:
        self._client = client
        self._console = console
        self._options = dict(options)
        self._system = system
        self._sides = [Side(model) for model in models]
        self._commands: Mapping[str, Callable[[str], None]] = {
            "adapter": self._choose,
            "system": self._instruct,
            "set": self._set,
            "retry": self._retry,
            "clear": self._clear,
            "good": lambda _: self._reward(1.0),
            "bad": lambda _: self._reward(0.0),
            "save": self._save,
            "help": lambda _: self._print(HELP),
        }

    def run(self) -> None:
        """Reads lines until the user ends the conversation. An error ends the line that made it."""
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
            self.ask(line)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    # -- commands --------------------------------------------------------------------------------

    def _choose(self, names: str) -> None:
        """Goes on with other adapters. Each of them gets what was said so far by the first one."""
        messages = self._sides[0].messages
        self._sides = [Side(model, list(messages)) for model in _checked([*names.split()] or [None])]
        self._print(" and ".join(side.name for side in self._sides))

    def _instruct(self, text: str) -> None:
        self._system = text

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name not in _NUMBERS:
            raise ParaLLMError(f"/set: name one of {', '.join(_NUMBERS)}, and a number")
        try:
            self._options[name] = _NUMBERS[name](value)
        except ValueError as error:
            raise ParaLLMError(f"/set {name}: {value!r} is no number that it can have") from error

    def _retry(self, _: str) -> None:
        """Takes the last question and its answers back, and asks it again."""
        asked = [side.messages for side in self._sides if side.messages]
        if not asked:
            raise ParaLLMError("/retry: nothing was asked yet")
        question = asked[0][-2]["content"]
        for messages in asked:
            if messages[-2]["content"] == question:
                del messages[-2:]
        self.ask(question)

    def _clear(self, _: str) -> None:
        self._sides = [Side(side.model) for side in self._sides]

    def _reward(self, score: float) -> None:
        ids = [side.trajectory_id for side in self._sides if side.trajectory_id is not None]
        if not ids:
            raise ParaLLMError("no answer to reward; start with --collect, on a server with --enable-rl-training")
        for trajectory_id in ids:
            self._client.ask("/v1/training/feedback", {"trajectory_id": trajectory_id, "score": score})
        self._print(f"rewarded with {score:g}")

    def _save(self, name: str) -> None:
        if not name:
            raise ParaLLMError("/save: name a file")
        try:
            Path(name).expanduser().write_text("\n".join(side.text for side in self._sides), encoding="utf-8")
        except OSError as error:
            raise ParaLLMError(f"/save: {name} cannot be written: {error.strerror}") from error
        self._print(f"wrote {name}")

    # -- answers ---------------------------------------------------------------------------------

    def ask(self, question: str) -> None:
        """Prints the answers while they come. Ctrl-C ends them; what has come is kept.

        Raises:
            ConfigError, ParaLLMError: an answer failed; the question is taken back.
            KeyboardInterrupt: the answers were interrupted.
        """
        for side in self._sides:
            side.messages.append({"role": "user", "content": question})
            side.answer, side.reasoning, side.trajectory_id = "", "", None
        try:
            asyncio.run(self._answers())
        finally:
            for side in self._sides:
                if side.answer:
                    side.messages.append({"role": "assistant", "content": side.answer})
                else:
                    side.messages.pop()

    async def _answers(self) -> None:
        from rich.live import Live

        console = self._console
        async with self._client.streaming(len(self._sides)) as http:
            if len(self._sides) == 1:
                await self._stream(http, self._sides[0], lambda text: console.out(text, end="", highlight=False))
                console.print()
                return
            both = (self._stream(http, side) for side in self._sides)
            if console.is_terminal:
                with Live(get_renderable=self._columns, console=console, refresh_per_second=_FRAMES_PER_SECOND):
                    await asyncio.gather(*both)
                return
            await asyncio.gather(*both)
            for side in self._sides:
                console.out(f"{side.name}:\n{side.reasoning}{side.answer}\n", highlight=False)

    def _columns(self) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        columns = Table(expand=True)
        for side in self._sides:
            columns.add_column(side.name, ratio=1)
        columns.add_row(
            *(Text(side.reasoning, style="dim").append(side.answer, style="not dim") for side in self._sides)
        )
        return columns

    async def _stream(self, http: httpx.AsyncClient, side: Side, write: Callable[[str], object] | None = None) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        model = {"model": side.model} if side.model else {}
        body = {**model, **self._options, "messages": [*system, *side.messages]}
        async for chunk in self._client.stream_chat(http, body):
            with self._client.reading():
                text = side.add(chunk)
            if write is not None and text:
                write(text)
                sys.stdout.flush()
