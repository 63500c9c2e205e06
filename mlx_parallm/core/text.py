"""Text and tokens: the tokenizer, and how a model marks its reasoning and its tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from mlx_parallm.model.tools.formats import ToolFormat

Tool = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool that a model wrote.

    `arguments` is the JSON text of an object. If the call is not `complete`, it is the beginning of one, or empty.
    `call_id` is None in families whose calls have no ids.
    """

    name: str
    arguments: str
    call_id: str | None = None
    complete: bool = True


RepairKind = Literal["form", "end", "quotes", "fence"]
"""What was wrong with a call that could mean one thing only: it was in another family's form; the end of its marks or
brackets was missing, or a bracket was closed twice; its JSON was not valid for a quote, a comma or a line break; or it
was in a fenced block."""


@dataclass(frozen=True, slots=True)
class RepairedCalls:
    """Calls of a text that is no valid call in the form of its family."""

    kind: RepairKind
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call that a model is writing. Only the first piece of a call has a `name`, and only the last one is
    `complete`. The `arguments` of all pieces, joined, are the JSON text of an object.
    """

    arguments: str = ""
    name: str | None = None
    call_id: str | None = None
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around a model's reasoning, which comes before its answer.

    Attributes:
        start, end: the marks around the reasoning.
        around: marks that some families put around the answer itself. They are removed from the text.
        repeats: whether reasoning may come again, after text of the answer.
        opening: what the model writes between its reasoning and a text that follows a grammar of the client.
        field: the field of an earlier message in which the chat template takes the reasoning; `content` means a list
            of parts.
        visible_specials: ids of the special tokens that the marks consist of.
    """

    start: str
    end: str
    around: tuple[str, ...] = ()
    repeats: bool = False
    opening: str = ""
    field: str = "reasoning_content"
    visible_specials: frozenset[int] = frozenset()

    @property
    def all_marks(self) -> str:
        """All fixed texts, joined."""
        return "".join([self.start, self.end, *self.around, self.opening])


class JsonPosition:
    """Whether a JSON text that comes in parts is inside a string, and how many brackets are open."""

    def __init__(self) -> None:
        self.in_string = False
        self.depth = 0
        self._escaped = False

    def read(self, text: str) -> None:
        for char in text:
            if self.in_string:
                self.in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            else:
                self.in_string = char == '"'
                self.depth += (char in "{[") - (char in "}]")


class UnwritableToolError(ValueError):
    """A tool whose calls a family cannot write. `index` is the tool's place in the list."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class TextTokenizer(Protocol):
    """Converts text to token ids and back. Safe to use from any thread.

    Attributes:
        special_ids: tokens that are not text, including the end-of-sequence tokens.
        reasoning: None if the model does not mark its reasoning.
    """

    vocab_size: int
    eos_token: str | None
    bos_token: str | None
    eos_token_ids: frozenset[int]
    special_ids: frozenset[int]
    chat_template: str | None
    tool_format: ToolFormat
    reasoning: Reasoning | None

    def encode(self, text: str, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """The token ids of a text.

        Raises:
            ContextLengthError: the text is so long that it must have more than `at_most` tokens.
        """

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a UTF-8 character."""

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary writes it, such as `Ġthe`. Empty for the ids that pad a vocabulary."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        at_most: int | None = None,
        *,
        template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Renders a chat template, by default the model's own, in a sandbox and encodes the result. With
        `continue_final_message`, the result ends with the text of the last message.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses the messages.
            ContextLengthError: the rendered text must have more than `at_most` tokens.
        """


RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that are not free for variables of a chat template: the arguments of Transformers' `apply_chat_template`."""
_SPECIAL = "_token"
"""How the names of the tokenizer's own variables end, such as `bos_token`."""


def is_free_variable(name: str) -> bool:
    """Whether a variable of this name may be given to a chat template."""
    return name not in RESERVED_VARIABLES and not name.endswith(_SPECIAL)


def end_id(tokenizer: TextTokenizer) -> int:
    """The end-of-sequence token; if the model has several, the one that the tokenizer names."""
    ends = sorted(tokenizer.eos_token_ids)
    return next((end for end in ends if tokenizer.token_string(end) == tokenizer.eos_token), ends[0])


def control_ids(tokenizer: TextTokenizer) -> frozenset[int]:
    """Special tokens that are no part of an answer. Those of tool calls and of reasoning may be."""
    allowed = tokenizer.tool_format.visible_specials if tokenizer.tool_format else frozenset[int]()
    allowed |= tokenizer.reasoning.visible_specials if tokenizer.reasoning else frozenset[int]()
    return tokenizer.special_ids - allowed


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`, but not all of `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)
