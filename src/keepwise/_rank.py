"""Which of several processes this is: only the first one speaks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

logger = logging.getLogger("keepwise")
"""Plans and what is being done, at INFO."""


def rank() -> int:
    """Rank of this process among those of `torch.distributed` or of a launcher; 0 without them."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return 0


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing is logged inside."""

    def drop(_: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
