"""Devices as data: memory, rates and links, from the makers' data sheets (dense rates, no sparsity)."""

from __future__ import annotations

import msgspec

from keepwise._errors import UsageError

_GIB = 1 << 30


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator."""

    name: str
    """what people call it."""
    memory_bytes: int
    """bytes of its memory."""
    half_flops: float
    """16-bit matrix operations a second, dense, with fp32 accumulation."""
    single_flops: float
    """fp32 (or tf32 where it is the default of training) matrix operations a second."""
    memory_bandwidth: float
    """bytes a second of its memory."""
    link_bandwidth: float
    """bytes a second and direction to the other devices of the node."""
    host_bandwidth: float
    """bytes a second and direction to the host."""
    network_bandwidth: float = 50e9
    """bytes a second and direction to other nodes (400 Gbit/s a device unless known better)."""

    @property
    def usable_bytes(self) -> int:
        """Bytes for tensors: less max(1 GiB, 5 %) for context, libraries and fragmentation, as `budget="auto"` takes off."""
        if self.name == "CPU":
            return self.memory_bytes
        return self.memory_bytes - max(_GIB, self.memory_bytes // 20)


def _gpu(name: str, gib: float, half: float, single: float, memory: float, link: float, host: float) -> Device:
    return Device(
        name=name,
        memory_bytes=int(gib * _GIB),
        half_flops=half * 1e12,
        single_flops=single * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=link * 1e9,
        host_bandwidth=host * 1e9,
    )


DEVICES: dict[str, Device] = {
    "t4": _gpu("T4 16 GiB", 16, 65, 8.1, 320, 12, 12),
    "v100": _gpu("V100 32 GiB", 32, 125, 15.7, 900, 150, 12),
    "l4": _gpu("L4 24 GiB", 24, 121, 60, 300, 25, 25),
    "rtx3090": _gpu("RTX 3090 24 GiB", 24, 71, 35.5, 936, 25, 25),
    "rtx4090": _gpu("RTX 4090 24 GiB", 24, 165, 82.6, 1008, 25, 25),
    "rtx5090": _gpu("RTX 5090 32 GiB", 32, 209, 104.8, 1792, 50, 50),
    "a10g": _gpu("A10G 24 GiB", 24, 70, 35, 600, 25, 25),
    "a6000": _gpu("RTX A6000 48 GiB", 48, 155, 77, 768, 56, 25),
    "l40s": _gpu("L40S 48 GiB", 48, 362, 183, 864, 25, 25),
    "a100-40": _gpu("A100 40 GiB", 40, 312, 156, 1555, 300, 25),
    "a100": _gpu("A100 80 GiB", 80, 312, 156, 2039, 300, 25),
    "h100": _gpu("H100 80 GiB", 80, 989, 494, 3350, 450, 55),
    "h200": _gpu("H200 140 GiB", 140, 989, 494, 4800, 450, 55),
    "b200": _gpu("B200 179 GiB", 179, 2250, 1125, 8000, 900, 55),
    "mi300x": _gpu("MI300X 191 GiB", 191, 1307, 653, 5300, 448, 55),
    "tpu-v5p": _gpu("TPU v5p 95 GiB", 95, 459, 115, 2765, 300, 25),
    "cpu": _gpu("CPU", 64, 1, 1, 50, 10, 50),
}
"""Known devices by key."""


def device_of(name: str) -> Device:
    """The device of that key, or a bare size such as "24GiB" with an A100's rates.

    Raises:
        UsageError: when it is neither.
    """
    from msgspec.structs import replace

    from keepwise.estimator.units import parse_bytes

    key = name.strip().lower()
    if key in DEVICES:
        return DEVICES[key]
    try:
        size = parse_bytes(name)
    except UsageError:
        raise UsageError(
            f"device {name!r} is not known; known: {', '.join(DEVICES)}, or a size such as 24GiB"
        ) from None
    return replace(DEVICES["a100"], name=name, memory_bytes=size)
