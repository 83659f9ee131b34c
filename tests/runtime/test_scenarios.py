"""What only goes well because the runtime takes care of it: see `scenarios`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .scenarios import SCENARIOS


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_scenario(scenario: Callable[[], None]) -> None:
    scenario()
