"""Seconds of an op on a device where it was not run: the slower of its arithmetic and its memory traffic, and a launch.

What was run is timed (`trace.timing`), also what cannot be run alone: then its time inside of the step counts. The roofline is for
machines that are not here: it knows nothing of caches, of poor shapes, of what a kernel does besides. Compare plans with it, not clocks.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from keepwise.cost.devices import DeviceProfile
from keepwise.ir import Op, Step, Value

_HALF = frozenset(("float16", "bfloat16", "complex32"))
_DOUBLE = frozenset(("float64", "complex128"))
_BYTES = {
    "complex128": 16,
    **dict.fromkeys(("float64", "int64", "complex64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "complex32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
}
"""Bytes of an element; 1 for what is not listed (bool, 8-bit types)."""


def op_bytes(step: Step, op: Op) -> int:
    """Bytes that an op reads and writes at least: each argument and each result once; 0 for views.

    What an expanded dimension (stride 0) repeats is read once.
    """
    if op.is_view:
        return 0
    views = {step.values[v].view: _nbytes(step.values[v]) for v in (*op.inputs, *op.outputs) if v >= 0}
    return sum(views.values())


def _nbytes(value: Value) -> int:
    strides = value.stride if len(value.stride) == len(value.shape) else (1,) * len(value.shape)
    elements = math.prod(n for n, stride in zip(value.shape, strides, strict=True) if stride != 0)
    return elements * _BYTES.get(value.dtype, 1)


def op_seconds(step: Step, op: Op, device: DeviceProfile) -> float:
    """Seconds of one op by the roofline of a device.

    The matrix rate is that of the widest floating type among the arguments; double precision is taken to be half as fast as single.
    """
    if op.is_view:
        return 0.0
    types = {step.values[v].dtype for v in op.inputs if v >= 0}
    rate = device.single_flops
    if types & _DOUBLE:
        rate /= 2
    elif types & _HALF and "float32" not in types:
        rate = device.half_flops
    arithmetic = op.flops / (rate * device.matrix_share)
    traffic = op_bytes(step, op) / (device.memory_bandwidth * device.stream_share)
    return device.launch_seconds + max(arithmetic, traffic)


def on_device(step: Step, device: DeviceProfile) -> Step:
    """The same step with the prices of another device: of each op, of the whole, and of packing (two passes over the bytes).

    Bytes, ops and what may be replayed stay as recorded; another device may run other kernels.
    """
    ops = tuple(replace(op, seconds=op_seconds(step, op, device)) for op in step.ops)
    stream = device.memory_bandwidth * device.stream_share
    storages = tuple(
        replace(s, pack_seconds=2 * (device.launch_seconds + s.nbytes / stream)) if s.packed_bytes else s
        for s in step.storages
    )
    return replace(step, ops=ops, storages=storages, seconds=math.fsum(op.seconds for op in ops))
