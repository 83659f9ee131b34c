"""Devices as data: memory, rates and links. One JSON file each can hold what is not in the table, or was measured.

The table's rates are the makers' (data sheets: dense, no sparsity); `matrix_share` and `stream_share` say how much of them real
kernels reach. A measured profile (`keepwise env --profile FILE`) has what kernels reached as its rates, and 1 for both shares.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from keepwise._errors import UsageError
from keepwise._units import parse_bytes

_GIB = 1 << 30
PROFILE_VERSION = 1
_POSITIVE = ("memory_bytes", "half_flops", "single_flops", "memory_bandwidth", "link_bandwidth", "host_bandwidth")


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device."""

    kind: str = "keepwise.device"
    version: int = PROFILE_VERSION
    name: str
    """What people call it."""
    memory_bytes: int
    """Bytes of its memory."""
    half_flops: float
    """16-bit matrix operations a second, dense, with fp32 accumulation."""
    single_flops: float
    """fp32 (or tf32 where it is the default of training) matrix operations a second."""
    memory_bandwidth: float
    """Bytes a second of its memory."""
    link_bandwidth: float
    """Bytes a second and direction to the other devices of the node."""
    host_bandwidth: float
    """Bytes a second and direction to the host."""
    network_bandwidth: float = 50e9
    """Bytes a second and direction to other nodes (400 Gbit/s a device unless known better)."""
    launch_seconds: float = 3e-6
    """What an op takes however small it is."""
    matrix_share: float = 0.5
    """Share of the matrix rates that products reach."""
    stream_share: float = 0.8
    """Share of the memory bandwidth that elementwise kernels reach."""
    is_host: bool = False
    """Whether its memory is the host's, of which nothing is set aside for a context or libraries."""

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            if not getattr(self, field) > 0:
                raise ValueError(f"`{field}` must be above 0, got {getattr(self, field)!r}")
        for field in ("matrix_share", "stream_share"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"`{field}` must be above 0 and at most 1, got {getattr(self, field)!r}")

    @property
    def usable_bytes(self) -> int:
        """Bytes for tensors: on an accelerator less max(1 GiB, 5 %) for context, libraries and fragmentation, as `budget="auto"`."""
        if self.is_host:
            return self.memory_bytes
        return self.memory_bytes - max(_GIB, self.memory_bytes // 20)

    def to_json(self) -> bytes:
        """The profile as a JSON document for people."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @staticmethod
    def from_json(data: bytes, where: str = "the device profile") -> DeviceProfile:
        """Read what `to_json` wrote, or a hand-written one.

        Args:
            data: the document.
            where: what messages call it.

        Raises:
            UsageError: it is no profile, or one of another version, or its numbers are impossible.
        """
        try:
            found = msgspec.json.decode(data, type=DeviceProfile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{where} is no device profile: {error}. `keepwise env --profile FILE` writes one of this machine"
            ) from None
        if found.kind != "keepwise.device" or found.version != PROFILE_VERSION:
            raise UsageError(
                f"{where} is {found.kind!r} of version {found.version}; this release reads 'keepwise.device' of version {PROFILE_VERSION}"
            )
        return found


def _gpu(name: str, gib: float, half: float, single: float, memory: float, link: float, host: float) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        memory_bytes=int(gib * _GIB),
        half_flops=half * 1e12,
        single_flops=single * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=link * 1e9,
        host_bandwidth=host * 1e9,
    )


DEVICES: dict[str, DeviceProfile] = {
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
    "cpu": replace(_gpu("CPU", 64, 1, 1, 50, 10, 50), is_host=True),
}
"""Known devices by key."""


def device_of(name: str) -> DeviceProfile:
    """A device by its key in `DEVICES`, by the path of a JSON profile, or a bare size such as "24GiB" with an A100's rates.

    Raises:
        UsageError: it is nothing of that, or the file is no profile.
    """
    key = name.strip().lower()
    if key in DEVICES:
        return DEVICES[key]
    if key.endswith(".json"):
        try:
            return DeviceProfile.from_json(Path(name).read_bytes(), name)
        except OSError as error:
            raise UsageError(f"the device profile {name} cannot be read: {error.strerror or error}") from None
    try:
        size = parse_bytes(name)
    except UsageError:
        raise UsageError(
            f"device {name!r} is not known; known: {', '.join(DEVICES)}; or a profile.json; or a size such as 24GiB"
        ) from None
    return replace(DEVICES["a100"], name=name, memory_bytes=size)
