"""Imports of optional packages, with an error that says how to get them; and what all built-in targets do alike."""

from __future__ import annotations

import fnmatch
import importlib
import os
from typing import TYPE_CHECKING, Any

from keepwise._errors import UsageError

if TYPE_CHECKING:
    from torch import nn


def require(package: str, *, extra: str) -> Any:
    """Import an optional package, without the network.

    Raises:
        UsageError: it is not installed; the message has the command that installs it.
    """
    # Weights are random and nothing is fetched; without this variable the hub's client may ask the network at import.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != package:
            raise  # Installed, but something that it needs itself is missing or broken: the original error says more.
        raise UsageError(f"this target needs the package {package}: pip install 'keepwise[{extra}]'") from error


def block_names(model: nn.Module, *patterns: str) -> tuple[str, ...]:
    """Paths of the modules that match one of the shell patterns, at that pattern's depth, in order of definition."""
    found: list[str] = []
    for pattern in patterns:
        found += [
            name
            for name, _ in model.named_modules()
            if name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)
        ]
    return tuple(found)
