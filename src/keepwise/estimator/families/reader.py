"""Reading numbers out of a configuration, with one clear error for what is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from keepwise._errors import UsageError


class Config(msgspec.Struct, frozen=True):
    """A configuration mapping and the notes that its reader adds."""

    values: Mapping[str, Any]
    """the keys of a `config.json`."""
    notes: list[str]
    """what was assumed."""

    @property
    def family(self) -> str:
        """`model_type`."""
        return str(self.values.get("model_type", "llama"))

    def size(self, *names: str, default: int | None = None) -> int:
        """A size above 0 under the first of `names` that is set.

        Raises:
            UsageError: when none is set and there is no default, or it is no whole number above 0.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
                raise UsageError(f"{name} must be a whole number above 0, not {value!r}")
            return int(value)
        if default is None:
            raise UsageError(f"the configuration of a {self.family} needs {' or '.join(names)}")
        return default

    def optional(self, *names: str) -> int | None:
        """A size, or None where it is missing, null or 0."""
        for name in names:
            if self.values.get(name):
                return self.size(name)
        return None

    def rate(self, *names: str, default: float = 0.0) -> float:
        """A probability."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if not isinstance(value, (int, float)) or not 0 <= value < 1:
                    raise UsageError(f"{name} must be a probability from 0 up to 1, not {value!r}")
                return float(value)
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """A switch."""
        value = self.values.get(name)
        return default if value is None else bool(value)

    def text(self, *names: str, default: str) -> str:
        """A name."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return str(value)
        return default

    def layer_types(self, layers: int) -> list[str] | None:
        """`layer_types`, one entry a layer, or None."""
        types = self.values.get("layer_types")
        if types is None:
            return None
        if len(types) != layers:
            raise UsageError(f"layer_types has {len(types)} entries for {layers} layers")
        return [str(kind) for kind in types]
