"""Every error that Keepwise raises on purpose.

```
KeepwiseError
├── UsageError            (also ValueError)   a bad argument: what it was, what is accepted
├── InfeasibleBudget      no plan fits: `.floor_bytes`, `.binding`
├── PlanMismatch          a plan for another model, version or step: the first difference
└── MismatchError         a replay differs from its original (found by `verify` or `audit`)
```

A tensor that backward needs and that was modified in place raises `RuntimeError`, as in plain autograd.
"""

from __future__ import annotations


class KeepwiseError(Exception):
    """Root of all errors raised by Keepwise."""


class UsageError(KeepwiseError, ValueError):
    """A bad argument. The message says what it was and what is accepted."""


class InfeasibleBudget(KeepwiseError):  # noqa: N818 - public name
    """No plan fits the budget.

    Attributes:
        floor_bytes: smallest peak that any plan reaches, in bytes.
        binding: the moment and the tensors that bind it, in words.
    """

    def __init__(self, message: str, *, floor_bytes: int, binding: str = "") -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.binding = binding


class PlanMismatch(KeepwiseError):  # noqa: N818 - public name
    """A plan is applied to another architecture, torch version or step than it was made for."""


class MismatchError(KeepwiseError):
    """A replayed tensor differs from its original. The message names the tensor."""
