"""Stand-ins for modules that a serving package imports and that are not installed, such as PyTorch and CUDA kernels.

They let its routes, schemas and answer builders be imported as published. An attribute of a stand-in is a class that
may be called, subclassed, subscripted or used as a decorator; nothing is computed with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any


class _StandIn(ABCMeta):
    """The type of every attribute of a stand-in module."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """The argument, where it is used as a decorator."""
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else _stand_in(f"{cls.__qualname__}()")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def register(cls, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)

    def __setitem__(cls, item: Any, value: Any) -> None:
        pass

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __index__(cls) -> int:
        return 0

    __int__ = __index__

    def __lt__(cls, other: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *error: object) -> None:
        pass

    def __add__(cls, other: Any) -> Any:
        return cls

    __radd__ = __sub__ = __mul__ = __rmul__ = __add__


def _any(cls: Any, source: Any, handler: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _stand_in(name: str) -> Any:
    members = {"__qualname__": name, "__module__": __name__, "__get_pydantic_core_schema__": classmethod(_any)}
    return _StandIn(name.rsplit(".", 1)[-1], (), members)


ABSENT = {"torch.npu", "torch_npu", "torchada", "brotli", "brotlicffi", "chardet", "simplejson", "socks"}
"""Modules that are not there: packages look for them to find out which device they run on."""


class _Module(ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "999.0"

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or f"{self.__name__}.{name}" in ABSENT:
            raise AttributeError(name)
        made = _stand_in(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules below `replaced`, and the packages that nothing else finds.

    Args:
        replaced: modules of the serving package itself that are compiled, or only patch what is stood in for.
    """

    def __init__(self, *replaced: str) -> None:
        self._replaced = replaced
        self._used: set[str] = set()
        sys.meta_path.insert(0, _Replacing(self))
        sys.meta_path.append(self)

    @property
    def used(self) -> list[str]:
        """The packages and modules that were stood in for."""
        return sorted(self._used)

    def replacement(self, name: str) -> Any:
        """The spec of a module below `replaced`."""
        root = next((root for root in self._replaced if name == root or name.startswith(f"{root}.")), None)
        return None if root is None else self._spec(name, root)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top, parent = fullname.split(".")[0], fullname.rpartition(".")[0]
        if fullname in ABSENT or top in sys.stdlib_module_names:
            return None
        if parent and not isinstance(sys.modules.get(parent), _Module):
            return None
        return self._spec(fullname, top)

    def _spec(self, name: str, root: str) -> Any:
        self._used.add(root)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Replacing(importlib.abc.MetaPathFinder):
    """Asked before the package's own files are looked for."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return self._stand_ins.replacement(fullname)
