"""A folder with plans, so that a second run of the same training does not trace again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from keepwise._errors import KeepwiseError
from keepwise.session.fingerprint import Fingerprint, fingerprint
from keepwise.session.plan import Plan


def code_of(function: Any) -> str:
    """What tells a user's function from another one, in this process and the next: its name and a digest of its code."""
    inner = getattr(function, "__func__", getattr(function, "func", function))
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(function).__qualname__)
    if function is None or code is None:
        return "" if function is None else name
    consts = [c for c in code.co_consts if isinstance(c, (int, float, str, bytes, bool, tuple))]
    text = code.co_code + repr((consts, code.co_names)).encode()
    return f"{name} {hashlib.blake2b(text, digest_size=8).hexdigest()}"


class PlanCache:
    """Plans keyed by model, options and batch shapes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _path(self, made_for: Fingerprint, key: Any) -> Path:
        text = msgspec.json.encode(made_for) + repr(key).encode()
        return self.folder / f"{made_for.model}-{hashlib.blake2b(text, digest_size=8).hexdigest()}.json"

    def find(self, model: nn.Module, key: Any) -> Plan | None:
        """A plan for this model and these options, or None."""
        path = self._path(fingerprint(model), key)
        if not path.exists():
            return None
        try:
            return Plan.load(path)
        except KeepwiseError:
            return None  # damaged or of an older version: it is planned again and overwritten

    def add(self, plan: Plan, key: Any) -> None:
        """Keep a plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plan.save(self._path(plan.document.fingerprint, key))
