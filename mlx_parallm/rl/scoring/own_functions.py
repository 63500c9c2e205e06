"""Reward functions in the operator's own file: how they are loaded, and what arguments they get.

    def score(prompts, completions, completion_ids, answer, **kwargs): return [...]     TRL: the whole group
    def score(prompt, completion, answer, state, task, info): return 1.0                verifiers: any of these
    def score(sample): return 1.0                                                       one sample

The names of its parameters tell which one a function is. Each may be async. A function may also ask for a column of its
tasks by name. A prompt that the task or the request has as messages gives completions as messages, a text gives texts.
Only child processes load such a function.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from mlx_parallm.rl.scoring.sample import GroupScorer, ScorerError, ScorerInput, as_number

_OF_A_GROUP = frozenset(
    {"prompts", "completions", "prompt_ids", "completion_ids", "answers", "states", "tasks", "infos"}
)
_OF_ONE = frozenset({"prompt", "completion", "answer", "state", "task", "info"})
_SIGNATURES = (
    "a reward function takes (prompts, completions, ...) as in TRL, some of (prompt, completion, answer, state, task, "
    "info) as in verifiers, or one sample"
)
_INSTALLED = ("site-packages", "dist-packages")

Values = Mapping[str, Any]


# ---- loading -------------------------------------------------------------------------------------


def load_function(reference: str) -> GroupScorer:
    """The function that `FILE.py:NAME` or `package.module:NAME` names. The folder of a file goes on the import path.

    Raises:
        ScorerError: there is no such file, module or function, it cannot be imported, or its parameters are unknown.
    """
    source, _, name = reference.rpartition(":")
    module = module_of_file(Path(source)) if source.endswith(".py") else _module(source)
    shown = Path(source).name if source.endswith(".py") else source
    function = getattr(module, name, None)
    if function is None:
        raise ScorerError(f"{shown} has no function {name}; {_others(module, name)}")
    if not callable(function) or isinstance(function, type):
        raise ScorerError(f"{shown}: {name} is not a function")
    file = getattr(module, "__file__", None)
    return RewardFunction(function, f"{shown}:{name}", Path(file).parent if file else None)


@cache
def module_of_file(file: Path) -> ModuleType:
    """Imports a user's file, whose folder goes on the import path.

    Raises:
        ScorerError: there is no such file, or it cannot be imported.
    """
    if not file.is_file():
        raise ScorerError(f"there is no file {file}")
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem not in sys.modules else f"{file.stem}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # the file's name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # the user's file may raise anything, even SystemExit
        sys.modules.pop(name, None)
        raise ScorerError(explained(error, file.parent)) from error
    return module


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except BaseException as error:  # the user's module may raise anything, even SystemExit
        advice = "" if not isinstance(error, ModuleNotFoundError) else "; for a file, write FILE.py:NAME"
        raise ScorerError(f"{name} cannot be imported: {type(error).__name__}: {error}{advice}") from error


def _others(module: ModuleType, name: str) -> str:
    own = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    near = get_close_matches(name, own, n=1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(own) or 'none'}"


def explained(error: BaseException, folder: Path | None) -> str:
    """The error as text. It begins with the place in `folder` that raised it, if there is one: `rewards.py:12: `."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    text = f"{type(error).__name__}: {error}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if folder is not None and file.is_relative_to(folder) and not set(_INSTALLED) & set(file.parts):
            return f"{file.relative_to(folder)}:{frame.lineno}: {text}"
    return text


# ---- calls ---------------------------------------------------------------------------------------


class RewardFunction:
    """A reward function as a scorer of groups.

    Args:
        name: for messages.
        folder: errors name the file and the line if they come from a file below this folder.

    Raises:
        ScorerError: the parameters are those of no known signature.
    """

    def __init__(self, function: Callable[..., object], name: str, folder: Path | None) -> None:
        self._function, self._name, self._folder = function, name, folder
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ScorerError(f"{name}: its parameters cannot be read: {error}") from error
        named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        self._names = frozenset(each.name for each in named)
        self._required = frozenset(each.name for each in named if each.default is each.empty)
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._score = self._chosen()

    def __call__(self, group: Sequence[ScorerInput]) -> list[float | None]:
        """One reward for each sample; None where the function says that it does not apply.

        Raises:
            ScorerError: the function raised, or did not return what it should.
        """
        try:
            return self._score(group)
        except ScorerError:
            raise
        except BaseException as error:  # the user's function may raise anything, even SystemExit
            raise ScorerError(explained(error, self._folder)) from error

    def _chosen(self) -> Callable[[Sequence[ScorerInput]], list[float | None]]:
        if self._names & _OF_A_GROUP:
            return self._whole_group
        if self._names & _OF_ONE:
            return self._each_by_name
        if len(self._required) == 1 or (not self._required and len(self._names) == 1):
            return self._each_sample
        raise ScorerError(f"{self._name}: {_SIGNATURES}; this one takes ({', '.join(sorted(self._names))})")

    def _whole_group(self, group: Sequence[ScorerInput]) -> list[float | None]:
        (rewards,) = _awaited([self._function(**self._arguments(_lists(group), group))])
        if isinstance(rewards, str | bytes | Mapping) or not isinstance(rewards, Iterable):
            kind = type(rewards).__name__
            raise ScorerError(f"{self._name} must return a list of {len(group)} rewards, not {kind}")
        listed = list(rewards)
        if len(listed) != len(group):
            raise ScorerError(f"{self._name} returned {len(listed)} rewards for {len(group)} completions")
        return list(map(self._reward, listed))

    def _each_by_name(self, group: Sequence[ScorerInput]) -> list[float | None]:
        arguments = [self._arguments(_values(sample), group) for sample in group]
        return list(map(self._reward, _awaited([self._function(**each) for each in arguments])))

    def _each_sample(self, group: Sequence[ScorerInput]) -> list[float | None]:
        return list(map(self._reward, _awaited([self._function(sample) for sample in group])))

    def _arguments(self, values: Values, group: Sequence[ScorerInput]) -> Values:
        """The values that the function asks for."""
        if missing := self._required - values.keys():
            columns = ", ".join(sorted({key for sample in group for key in sample.metadata})) or "none"
            raise ScorerError(
                f"{self._name} asks for {', '.join(sorted(missing))}: no such column of its tasks; they have {columns}"
            )
        if self._takes_any:
            return values
        return {name: value for name, value in values.items() if name in self._names}

    def _reward(self, value: object) -> float | None:
        try:
            return None if value is None else as_number(value)
        except TypeError as error:
            raise ScorerError(f"{self._name} {error}") from error


def _awaited(results: Sequence[object]) -> Sequence[object]:
    """The results, after those that are coroutines have run, all at once. The first error is raised."""
    if not any(map(inspect.isawaitable, results)):
        return results
    ended = _loop().run(_gathered(results))
    for result in ended:
        if isinstance(result, BaseException):
            raise result
    return ended


async def _gathered(results: Sequence[object]) -> Sequence[object]:
    async def value(result: object) -> object:
        return await cast(Awaitable[object], result) if inspect.isawaitable(result) else result

    return await asyncio.gather(*map(value, results), return_exceptions=True)


@cache
def _loop() -> asyncio.Runner:
    """One event loop for the life of the process, because a client that a module keeps belongs to its loop."""
    return asyncio.Runner()


# ---- arguments -----------------------------------------------------------------------------------


def _values(sample: ScorerInput) -> dict[str, Any]:
    """One sample in verifiers' names, and the columns of its task."""
    metadata = dict(sample.metadata)
    own = {
        "prompt": sample.prompt,
        "completion": sample.completion,
        "answer": metadata.get("answer", ""),
        "task": metadata.get("task", "default"),
        "info": _info(metadata.get("info")),
    }
    return {**metadata, **own, "state": {**metadata, **own, "finish_reason": sample.finish_reason}}


def _info(value: object) -> object:
    """The column `info`: an object, or the JSON text of one."""
    if not isinstance(value, str):
        return value or {}
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _lists(group: Sequence[ScorerInput]) -> dict[str, Any]:
    """The group in TRL's names: lists in the order of the samples. TRL's log functions are there and do nothing."""
    each = [_values(sample) for sample in group]
    keys = dict.fromkeys(key for sample in group for key in sample.metadata)
    return {
        **{f"{name}s": [values[name] for values in each] for name in ("answer", "state", "task", "info")},
        **{"trainer_state": None, "log_extra": _ignored, "log_metric": _ignored},
        **{key: [sample.metadata.get(key) for sample in group] for key in keys},
        "prompts": [sample.prompt for sample in group],
        "prompt_ids": [list(sample.prompt_ids) for sample in group],
        "completions": [sample.completion for sample in group],
        "completion_ids": [list(sample.completion_ids) for sample in group],
    }


def _ignored(*_: object, **__: object) -> None:
    pass
