"""Seconds of operators and of collectives on a device, by a roofline. Estimates: compare choices with them, not clocks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from keepwise.cost import DeviceProfile
from keepwise.estimator.graph import Collective, Graph, Op
from keepwise.estimator.precision import Precision

_WIRE = 0.8  # share of a link's bandwidth that large collectives reach


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one device under one precision."""

    flops: float
    """matrix operations a second."""
    stream: float
    """bytes a second to and from its memory."""
    link: float
    """bytes a second to the other devices of a tensor-parallel group."""
    network: float
    """bytes a second to other nodes."""
    host: float
    """bytes a second to the host."""

    def forward_seconds(self, graph: Graph, op: Op) -> float:
        """Seconds of one forward operator: the slower of its arithmetic and its traffic, and its collectives."""
        return self._seconds(graph, op, op.flops) + self.collective_seconds(op.collectives, phase="forward")

    def backward_seconds(self, graph: Graph, op: Op) -> float:
        """Seconds of one operator's backward."""
        return self._seconds(graph, op, op.backward_flops, traffic=2.0) + self.collective_seconds(
            op.collectives, phase="backward"
        )

    def _seconds(self, graph: Graph, op: Op, flops: float, traffic: float = 1.0) -> float:
        moved = graph.bytes_of((*op.inputs, *op.outputs), shared=True) * traffic
        return max(flops / self.flops, moved / self.stream)

    def collective_seconds(self, collectives: Iterable[Collective], *, phase: str | None = None) -> float:
        """Seconds of collectives: bytes on the wire over the link's rate, no overlap assumed."""
        total = 0.0
        for c in collectives:
            if phase is None or c.phase == phase:
                rate = self.link if c.group == "tensor" else self.network
                total += c.wire_bytes / rate
        return total


def rates(device: DeviceProfile, precision: Precision, efficiency: float) -> Rates:
    """Reachable rates."""
    peak = device.single_flops if precision.compute == 4 else device.half_flops
    return Rates(
        flops=peak * efficiency * (1.6 if precision.fp8 else 1.0),
        stream=device.memory_bandwidth * device.stream_share,
        link=device.link_bandwidth * _WIRE,
        network=device.network_bandwidth * _WIRE,
        host=device.host_bandwidth * _WIRE,
    )
