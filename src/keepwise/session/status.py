"""How planning ended."""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """Each value is a sentence that a user can act on."""

    FITS_UNCHANGED = "The plain step fits the budget; nothing was changed."
    OPTIMAL = "This is the fastest plan that fits, up to the stated gap, in the family of windows that was searched."
    FEASIBLE = "The plan fits the budget; a faster one may exist."
    INFEASIBLE = "No plan fits the budget; the one with the smallest peak was applied."
    INERT = "Keepwise is switched off (KEEPWISE=0) or cannot plan this step; the model runs as it is."
