"""Makes the device "dtorch" known to torch once both are imported, without importing torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_when_imported() -> None:
    """Register the device now if torch is imported, else right after it has been."""
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _Finder())
    elif not torch.__spec__._initializing:  # type: ignore[union-attr]  # CPython's own mark of a running import
        _register()


def _register() -> None:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("dtorch.")]
    if any(module.__spec__ is not None and module.__spec__._initializing for module in modules):  # type: ignore[attr-defined]
        return  # a submodule was imported by itself and is halfway: the first session registers the device
    importlib.import_module("dtorch.backend").register()


class _Finder(MetaPathFinder):
    """Lets others find torch, once, and wraps what loads it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """Loads torch with its own loader, then registers the device."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]  # has one: it is loading
        self._loader.exec_module(module)
        _register()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
