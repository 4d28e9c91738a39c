"""Makes the device "dtorch" known to torch once both are imported, in whatever order, without importing torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_when_imported() -> None:
    """Register the device now if torch is imported, else as soon as it has been."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.__spec__._initializing:  # type: ignore[union-attr]  # CPython's own mark
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    importlib.import_module("dtorch.backend").register()


class _Finder(MetaPathFinder):
    """Lets others find torch and modules of dtorch, and registers the device when the outermost one is loaded.

    Not before: a module of dtorch that imports torch is halfway then, and registering imports many of them.
    """

    def __init__(self) -> None:
        self.num_loading = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" and not name.startswith("dtorch."):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(self, spec.loader)
        return spec

    def loaded(self) -> None:
        """The outermost module is there; is torch?"""
        if "torch" in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register()


class _Loader(Loader):
    """Loads a module with its own loader, and tells the finder."""

    def __init__(self, finder: _Finder, loader: Loader) -> None:
        self._finder = finder
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]  # it is being loaded
        self._finder.num_loading += 1
        try:
            self._loader.exec_module(module)
        finally:
            self._finder.num_loading -= 1
        if self._finder.num_loading == 0:
            self._finder.loaded()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
