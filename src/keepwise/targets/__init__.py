"""The built-in models and data, and the loader for a user's own.

```
targets.names()                        # "gpt2", "gpt2-tiny", "gpt2-dropout", ...
target = targets.build("gpt2-tiny")    # weights from a seed, batch 0 of the data
target = targets.load("train.py:make") # a user's function, or a built-in name
target.step()                          # forward and backward
```

No framework is imported before a target is built, and `transformers` and `peft` only for a target that needs them.
"""

from __future__ import annotations

from keepwise.targets.load import load
from keepwise.targets.registry import build, describe, names
from keepwise.targets.target import Batch, Target, TargetFailed

__all__ = ["Batch", "Target", "TargetFailed", "build", "describe", "load", "names"]
