"""The request fields about the chat template: its variables, and which of the operator's templates is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from mlx_parallm.errors import ConfigError, InvalidRequestError
from mlx_parallm.server.api.fields import refused
from mlx_parallm.server.api.grammar_fields import is_shallow

MAX_VARIABLES, MAX_VARIABLE_NAME = 64, 64
MAX_VARIABLES_BYTES, MAX_VARIABLES_DEPTH = 64 * 1024, 16
RESERVED = frozenset(
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
"""Names that are not free for variables: the arguments of Transformers' `apply_chat_template`."""
SPECIAL = "_token"
"""How the names of the tokenizer's own variables end, such as `bos_token`."""
TEMPLATES = "*.jinja"


def _variables(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_VARIABLES:
        raise refused(f"must be an object of at most {MAX_VARIABLES} variables")
    for name in value:
        if name in RESERVED or name.endswith(SPECIAL):
            raise refused("is not a free variable of the chat template; some have a field of their own", name)
        if not name.isidentifier() or len(name) > MAX_VARIABLE_NAME:
            raise refused(f"each name must be an identifier of at most {MAX_VARIABLE_NAME} characters")
    if not is_shallow(value, MAX_VARIABLES_DEPTH):
        raise refused(f"is nested deeper than {MAX_VARIABLES_DEPTH} levels")
    if len(json.dumps(value)) > MAX_VARIABLES_BYTES:
        raise refused(f"has more than {MAX_VARIABLES_BYTES} bytes as JSON")
    return {name: variable for name, variable in value.items() if variable is not None}


_Names = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "maxLength": MAX_VARIABLE_NAME, "not": {"enum": sorted(RESERVED)}}
TemplateVariables = Annotated[
    dict[str, Any],
    PlainValidator(
        _variables,
        json_schema_input_type=Annotated[
            dict[str, Any], Field(max_length=MAX_VARIABLES, json_schema_extra={"propertyNames": _Names})
        ],
    ),
]
"""Variables of the chat template, such as `enable_thinking`. Those that are null count as left out."""


def read_templates(folder: Path | None) -> Mapping[str, str]:
    """The chat templates of a folder by their files' names without `.jinja`.

    Raises:
        ConfigError: the folder has none, or a file cannot be read.
    """
    if folder is None:
        return {}
    try:
        templates = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob(TEMPLATES))}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_dir: {folder}: {error}") from None
    if not templates:
        raise ConfigError(f"chat_template_dir: {folder} has no file that ends with .jinja")
    return templates


def chosen_template(asked: str | None, own: str | None, allowed: Mapping[str, str]) -> str | None:
    """The template that a request asks for by its name or its text; None for the model's `own`.

    Raises:
        InvalidRequestError: it is neither the model's own nor one that the operator allows.
    """
    if asked is None or asked == own:
        return None
    if asked in allowed:
        return allowed[asked]
    if asked in allowed.values():
        return asked
    choice = f"send one of the names {', '.join(allowed)}" if allowed else "leave it out"
    raise InvalidRequestError(
        "chat_template: this is neither the model's own template, which GET /tokenizer_info has, nor one that the "
        f"operator allows with --chat-template-dir. A template is a program, so that of a client is not run: {choice}, "
        "or render it yourself and send the token ids to /v1/completions.",
        param="chat_template",
    )
