"""What devices can do, as data, and what an op would take on one that is not here.

`devices` is the table and the JSON form of a profile; `roofline` prices a recorded step with one.
"""

from __future__ import annotations

from keepwise.cost.devices import DEVICES, DeviceProfile, device_of
from keepwise.cost.roofline import on_device, op_bytes, op_seconds

__all__ = ["DEVICES", "DeviceProfile", "device_of", "on_device", "op_bytes", "op_seconds"]
