"""Property tests: the same examples in every run, unless `HYPOTHESIS_PROFILE=search` asks for new ones (`make test-all` does).

Results are written into memory of dead ones from one byte on, not from 64 KiB on: the tensors of tests are small.
Prices of ops are not kept on disk, where one run of the tests would change the next.
"""

from __future__ import annotations

import os

from hypothesis import settings

from keepwise.ir import spare

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("search", derandomize=False, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

spare.MIN_BYTES = 1
os.environ["KEEPWISE_CACHE_DIR"] = ""
