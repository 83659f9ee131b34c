"""300 steps of training on real text and pictures, plain and planned: the same digests after every step."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gpt2-dropout-tiny", "resnet50-tiny", "mixtral-tiny"])
def test_300_steps(keepwise, target):
    found = keepwise.json("verify", target, "--steps", "300")
    assert found["identical"] is True
    assert found["recomputed_identical"] is True
    assert found["num_replays_compared"] >= 300
    assert len(found["digests"]) == len(found["losses"]) == 300
    assert len(set(found["digests"])) == 300  # every step moved the weights
    assert found["losses"][-1] < found["losses"][0]
