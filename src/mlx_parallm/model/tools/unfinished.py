"""What is left of calls when their text is cut off: the whole calls, and as much of the last one as can be read.

A call is told from other text by its lead, which is what stands before the name of a tool. White space is not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from mlx_parallm.core import ToolCall
from mlx_parallm.model.tools.syntax import Syntax

Parse = Callable[[str], Sequence[ToolCall]]
"""The family's parser. Raises ValueError: the text is no call of a known tool."""

_MOST_TRIES = 8
_NAME = r"(?P<name>[\w.-]*)"
_DECODER = json.JSONDecoder()


def unfinished(syntax: Syntax, parse: Parse, text: str, names: frozenset[str]) -> tuple[ToolCall, ...]:
    """The calls of `text`, which came after a start mark and has no end mark. Empty: the name is not written yet.

    Only the last call may be incomplete: its `arguments` are then the beginning of a JSON text.

    Args:
        names: the tools that may be called.

    Raises:
        ValueError: no call begins like this.
    """
    for form in sorted((syntax, *syntax.native), key=lambda form: not _shows(form, text)):
        try:
            if form.argument is None:
                return tuple(_with_json(form, text, names))
            return tuple(_with_arguments(form, parse, text, names))
        except ValueError:
            continue
    raise ValueError("no call begins like this")


def _shows(syntax: Syntax, text: str) -> bool:
    """Whether an argument of this form is in the text; arguments that are JSON look alike in any."""
    return syntax.argument is not None and syntax.argument[0].partition("$key")[0] in text


def _with_json(syntax: Syntax, text: str, names: frozenset[str]) -> Iterator[ToolCall]:
    """Of a family whose arguments are a JSON object, the first one after the name."""
    found = _begun(syntax, text, names)
    while found is not None:
        name, at = found.group("name"), text.find("{", found.end())
        try:
            arguments, end = _DECODER.raw_decode(text, at) if at >= 0 else (None, 0)
        except (ValueError, RecursionError):
            arguments = None
        if arguments is None:
            yield ToolCall(name, text[at:] if at >= 0 else "", complete=False)
            return
        yield ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        found = _next(syntax, text, end, names)


def _with_arguments(syntax: Syntax, parse: Parse, text: str, names: frozenset[str]) -> Iterator[ToolCall]:
    """Of a family that writes each argument for itself."""
    whole, end = _whole(syntax, parse, text)
    yield from whole
    found = _next(syntax, text, end, names) if whole else _begun(syntax, text, names)
    if found is not None:
        rest = syntax.block[0] + syntax.lead + text[found.start("name") :]
        yield ToolCall(found.group("name"), _arguments(syntax, parse, rest), complete=False)


def _whole(syntax: Syntax, parse: Parse, text: str) -> tuple[Sequence[ToolCall], int]:
    """The calls that were closed, and where the last of them ends."""
    closing = syntax.call[1].strip()
    if not closing or closing not in text:
        return (), 0
    end = text.rindex(closing) + len(closing)
    try:
        return parse(text[:end] + syntax.block[1]), end
    except ValueError:
        return (), 0


def _begun(syntax: Syntax, text: str, names: frozenset[str]) -> re.Match[str] | None:
    """The lead and name that `text` begins with; None: they are not all written yet. Raises ValueError."""
    lead = syntax.block[0] + syntax.lead
    found = re.match(r"\s*" + _headed(lead), text)
    if found is None:
        if not _squeezed(lead).startswith(_squeezed(text)):
            raise ValueError("it is not the lead of a call")
        return None
    name = found.group("name")
    if found.end() == len(text) and any(known.startswith(name) for known in names):
        return None
    if name not in names:
        raise ValueError("it names no tool")
    return found


def _next(syntax: Syntax, text: str, start: int, names: frozenset[str]) -> re.Match[str] | None:
    """The lead and name of one more call."""
    if syntax.between is None:
        return None
    found = re.compile(_headed(syntax.between + syntax.lead)).search(text, start)
    named = found is not None and found.end() < len(text) and found.group("name") in names
    return found if named else None


def _headed(lead: str) -> str:
    """Regular expression of a lead, with white space wherever it may be, and a name."""
    return "".join(re.escape(char) + r"\s*" for char in _squeezed(lead)) + _NAME


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _arguments(syntax: Syntax, parse: Parse, text: str) -> str:
    """The beginning of the JSON of those arguments of the last call that were closed."""
    for closed in islice(_closed(syntax, text), _MOST_TRIES):
        try:
            arguments = parse(closed + syntax.call[1] + syntax.block[1])[-1].arguments
        except ValueError:
            continue
        return arguments.removesuffix("}") if arguments != "{}" else ""
    return ""


def _closed(syntax: Syntax, text: str) -> Iterator[str]:
    """`text` up to the end of an argument, the last one first. A quote that opens and closes comes in pairs."""
    assert syntax.argument is not None
    opening, closing = syntax.bare or ("", "")
    mark = (closing + syntax.argument[1]).strip()
    end = len(text)
    while (at := text.rfind(mark or syntax.comma.strip(), 0, end)) >= 0:
        closed, end = text[: at + len(mark)], at
        if not opening or opening != closing or closed.count(closing) % 2 == 0:
            yield closed
