"""A folder with plans, so that a second run of the same training does not trace again."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from keepwise._errors import KeepwiseError
from keepwise.session.fingerprint import fingerprint
from keepwise.session.plan import Plan


class PlanCache:
    """Plans keyed by model, options and batch shapes."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _path(self, model: nn.Module, key: Any) -> Path:
        text = msgspec.json.encode(fingerprint(model)) + repr(key).encode()
        return self.folder / f"{type(model).__name__}-{hashlib.blake2b(text, digest_size=8).hexdigest()}.json"

    def find(self, model: nn.Module, key: Any) -> Plan | None:
        """A plan for this model and these options, or None."""
        path = self._path(model, key)
        if not path.exists():
            return None
        try:
            return Plan.load(path)
        except KeepwiseError:
            return None  # damaged or of an older version: it is planned again and overwritten

    def add(self, plan: Plan, key: Any) -> None:
        """Keep a plan."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.encode(plan.document.fingerprint) + repr(key).encode()
        name = f"{plan.document.fingerprint.model}-{hashlib.blake2b(text, digest_size=8).hexdigest()}.json"
        plan.save(self.folder / name)
