"""Property tests: the same examples in every run, unless `HYPOTHESIS_PROFILE=search` asks for new ones (`make test-all` does)."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("search", derandomize=False, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
