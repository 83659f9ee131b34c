"""Profiles of devices: the table, and their JSON form."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from keepwise._errors import UsageError
from keepwise.cost import DEVICES, DeviceProfile, device_of


@pytest.mark.parametrize("key", DEVICES)
def test_a_profile_survives_its_json(key: str) -> None:
    assert DeviceProfile.from_json(DEVICES[key].to_json()) == DEVICES[key]
    assert device_of(key.upper()) is DEVICES[key]


def test_a_file_is_a_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    mine = replace(DEVICES["a100"], name="mine", memory_bytes=123 << 20)
    path.write_bytes(mine.to_json())
    assert device_of(str(path)) == mine


def test_a_size_is_a_device_of_that_size() -> None:
    assert device_of("24GiB").memory_bytes == 24 << 30


def test_newer_devices_are_faster() -> None:
    series = [DEVICES[k] for k in ("t4", "v100", "a100", "h100", "b200")]
    for older, newer in itertools.pairwise(series):
        assert newer.half_flops > older.half_flops
        assert newer.memory_bandwidth > older.memory_bandwidth


def test_what_is_no_profile_is_said_in_one_line(tmp_path: Path) -> None:
    good = json.loads(DEVICES["a100"].to_json())
    for content, says in (
        ("{", "no device profile"),
        ("\xff", "no device profile"),
        ("{}", "missing required field"),
        (json.dumps({**good, "memory_bytes": "much"}), "memory_bytes"),
        (json.dumps({**good, "memory_bytes": 0}), "above 0"),
        (json.dumps({**good, "stream_share": 1.5}), "at most 1"),
        (json.dumps({**good, "speed": 1}), "unknown field `speed`"),
        (json.dumps({**good, "version": 9}), "version 9"),
        (json.dumps({**good, "kind": "keepwise.plan"}), "keepwise.plan"),
    ):
        path = tmp_path / "p.json"
        path.write_text(content, encoding="latin-1")
        with pytest.raises(UsageError) as caught:
            device_of(str(path))
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        device_of(str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="known: t4"):
        device_of("abacus")
