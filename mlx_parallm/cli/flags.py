"""The flags of settings. Each setting has one by its key (--server.port), and many have a short one (--port), which is
declared with the field in the configuration (`config.types.Flag`). The description of the field is the help."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any, get_args

from mlx_parallm.cli.parser import Argument, Command, Parser, argument, group
from mlx_parallm.config import KEYS, SECTIONS, Key, Program, Setting
from mlx_parallm.errors import ConfigError

FLAGS = {name: key for key in KEYS.values() for name in key.flags}
"""The setting of each flag."""

_NULL = re.compile(r"\bnull means")
_WORDS = {"null": "not set", "[]": "none", "true": "on", "false": "off"}
"""Values of YAML in words, for the help."""
_BASE, _OTHER_BASES = "model.base_model_path", "model.other_base_models"
_RESUME, _FOLDER = "checkpointing.resume", "checkpointing.checkpoint_dir"
_MODEL_VARIABLE = KEYS[_BASE].env_name
MODEL = argument(
    "--model-path",
    metavar="DIR_OR_HUB_ID",
    default=os.environ.get(_MODEL_VARIABLE) or None,
    help=f"The base model. Default: what {_MODEL_VARIABLE} says, else the bundled one.",
)
"""The base model of a command that reads no other setting."""
_SOURCES = group(
    "settings",
    argument("--config", type=Path, metavar="FILE", help="A yaml file such as server_config.yaml."),
    argument(
        "--print-config", action="store_true", help="Print the resolved configuration with secrets masked, and exit."
    ),
    description="A flag takes precedence over its environment variable (in brackets), the variable over the file given "
    "with --config, and the file over the default.",
)


def flags_of(program: Program) -> Command:
    """The arguments --config, --print-config, --help-all, and the flag of every setting that `program` obeys. The
    others are refused by name."""

    def add(parser: Parser) -> None:
        parser.usage = "%(prog)s [flags]"  # argparse would list all of them
        parser.epilog = "--help-all shows all settings."
        parser.formatter_class = _BriefHelp
        parser.add_argument("--help-all", action=_HelpAll, help="show all settings and exit")
        _SOURCES(parser)
        for title, section in SECTIONS.items():
            keys = [key for key in KEYS.values() if key.section is section and key.flag.only in (None, program)]
            if keys:
                _add_flags(parser.add_argument_group(title, section.__doc__), keys, program)
        parser.refused = {
            name: only for key in KEYS.values() for name, only in key.flags.items() if only not in (None, program)
        }

    return add


def flags_of_keys(*paths: str) -> Argument:
    """The flags of these keys, for a parser or a group of one."""
    return lambda parser: _add_flags(parser, [KEYS[path] for path in paths])


def _add_flags(group: argparse._ActionsContainer, keys: Iterable[Key], program: Program | None = None) -> None:
    """Adds the flags of settings that a program has; None: all their flags. The help shows the short ones of a setting,
    if it has any, and not that by its key."""
    for key in keys:
        *short, by_path = (name for name, only in key.flags.items() if program is None or only in (None, program))
        options = {"default": None, "help": _help(key), **_value_options(key)}
        if short:
            group.add_argument(*short, dest=short[0], **options)
            options["help"] = argparse.SUPPRESS
        group.add_argument(by_path, dest=by_path, **options)


def _help(key: Key) -> str:
    description = key.description if _takes_null(key) else _NULL.sub("Not set means", key.description)
    return f"{description} {_default(key)} [{key.env_name}]".replace("%", "%%")


def _default(key: Key) -> str:
    return f"Default: {_WORDS.get(key.default_text, key.default_text)}."


class _BriefHelp(argparse.HelpFormatter):
    """The help without settings that are not common, and of these the beginning of their descriptions."""

    def add_text(self, text: str | None) -> None:
        if self._current_section.parent is None:  # a group with a description would be shown without arguments, too
            super().add_text(text)

    def add_argument(self, action: argparse.Action) -> None:
        key = FLAGS.get(action.dest)
        if key is None:
            super().add_argument(action)
        elif key.flag.common and action.dest == key.flag.name:
            action = copy(action)
            action.help = f"{re.split('[.;] ', key.description)[0].rstrip('.')}. {_default(key)}".replace("%", "%%")
            super().add_argument(action)


class _HelpAll(argparse._HelpAction):
    """Prints the help with all settings, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parser.formatter_class, parser.epilog = argparse.HelpFormatter, None
        super().__call__(parser, *arguments)


def _value_options(key: Key) -> dict[str, Any]:
    if key.path == _RESUME:
        return {"action": _Resume}
    annotation = key.field.annotation
    if bool in (annotation, *get_args(annotation)) and not key.flag.metavar:
        return {"action": argparse.BooleanOptionalAction}
    several = {"nargs": "+", "action": "extend"} if key.flag.several else {}
    return {"metavar": key.flag.metavar or "VALUE", **several}


class _Resume(argparse.Action):
    """`--resume`, `--resume RUN` or `--no-resume`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        negated = [f"--no-{name[2:]}" for name in option_strings]
        super().__init__([*option_strings, *negated], dest, nargs="?", metavar="RUN", **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        is_on = option in FLAGS
        if values is not None and not is_on:
            parser.error(f"{option} takes no value, got {values!r}")
        setattr(namespace, self.dest, is_on if values is None else values)


def settings(args: argparse.Namespace) -> dict[str, Setting]:
    """The settings of the flags that were given, by key path. Values stay text until the configuration checks them.

    Raises:
        ConfigError: two flags set the same key, or name the folder of the run.
    """
    found: dict[str, Setting] = {}
    for name, value in vars(args).items():
        key = FLAGS.get(name)
        if key is None or value is None:
            continue
        if key.path == _BASE:
            value, *others = value
            if others:
                _add(found, _OTHER_BASES, Setting(others, name))
        _add(found, key.path, Setting(_read(key, value), name))
    run = found.get(_RESUME)
    if run is not None and isinstance(run.value, str):
        if _FOLDER in found:
            raise ConfigError(
                f"{run.source}: {run.value} is a run, and {found[_FOLDER].source} names one too; keep one"
            )
        from mlx_parallm.adapters.runs import named_run

        found[_FOLDER] = Setting(str(named_run(run.value)), run.source)
        found[_RESUME] = Setting(True, run.source)
    return found


def _add(found: dict[str, Setting], path: str, setting: Setting) -> None:
    if path in found:
        raise ConfigError(f"{setting.source}: {found[path].source} sets {path} too; keep one of them")
    found[path] = setting


def _read(key: Key, value: object) -> object:
    """Several values of one flag as one text, as in the environment; null where the text null stands for it."""
    text = ",".join(value) if isinstance(value, list) else value
    return None if text == "null" and _takes_null(key) else text


def _takes_null(key: Key) -> bool:
    """Whether the text null is null: the setting may be null, and is not if the flag is left out."""
    return type(None) in get_args(key.field.annotation) and key.field.default is not None
