"""py-libp2p without the parts of it that nothing here uses.

Importing py-libp2p takes in a finder of peers by mDNS and a client for certificates, with the HTTP libraries of the
latter: a quarter of the memory that an observer has. They are replaced by stand-ins while it is imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

UNUSED: Final = ("httpx", "requests", "zeroconf")
"""Taken in by the library at import; used by it only for AutoTLS and mDNS, both of which are off."""


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Imports inside of the block get stand-ins for ``UNUSED``, unless the real ones are there already."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]  # whoever imports it later gets the real one


class _Absent:
    """What stands for everything in them; good for annotations and base classes, and for nothing else."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} was left out to save memory")


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,) if name.endswith(("Error", "Exception")) else (_Absent,), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in UNUSED:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""
