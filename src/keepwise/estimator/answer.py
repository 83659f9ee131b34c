"""The answer: plain data, by category, for each rank that differs."""

from __future__ import annotations

from typing import Any

import msgspec


class Categories(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device at one moment, by what they are for. Checkpointing changes only the last four."""

    parameters: int = 0
    """weights as they are stored on the device."""
    gradients: int = 0
    """gradient buffers."""
    optimizer: int = 0
    """optimizer state and master copies."""
    weight_copies: int = 0
    """8-bit copies of weights (autocast's narrow copies are saved tensors and count as activations)."""
    communication: int = 0
    """gathered parameters and unreduced gradients of sharded training."""
    inputs: int = 0
    """the batch."""
    kept_activations: int = 0
    """what is held from forward to backward."""
    rebuilt_activations: int = 0
    """what the segment in hand has made again."""
    logits: int = 0
    """final norm, logits and loss."""
    temporaries: int = 0
    """gradients of activations and workspaces."""

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.as_dict().values())

    @property
    def activations(self) -> int:
        """Bytes that checkpointing can change: kept, rebuilt, logits and temporaries."""
        return self.kept_activations + self.rebuilt_activations + self.logits + self.temporaries

    @property
    def static(self) -> int:
        """Bytes that are there in every moment."""
        return self.parameters + self.gradients + self.optimizer

    def as_dict(self) -> dict[str, int]:
        """Category to bytes, in the order of the fields."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a step at which memory may be highest."""

    name: str
    """what happens."""
    categories: Categories
    """bytes then."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and cost of one kind of rank."""

    name: str
    """"every rank", or which pipeline stages."""
    stages: tuple[int, ...]
    """pipeline stages that are like this."""
    layers: int
    """blocks on it."""
    in_flight: float
    """micro-batches whose activations it holds at most."""
    kept_bytes: int
    """bytes: activations held after the forward of all micro-batches in flight."""
    peak: Moment
    """the moment with the most bytes."""
    moments: tuple[Moment, ...]
    """all moments that were looked at, the highest of each kind."""
    host_bytes: int
    """bytes in host memory because of offload."""
    forward_flops: float
    """operations of one step's forward passes."""
    backward_flops: float
    """operations of one step's backward passes, without recomputation."""
    rebuilt_flops: float
    """operations that run again in one step."""
    forward_seconds: float
    """seconds of one step's forward passes, by the roofline."""
    backward_seconds: float
    """seconds of one step's backward passes."""
    rebuilt_seconds: float
    """seconds of what runs again, its collectives included."""

    @property
    def peak_bytes(self) -> int:
        """Bytes at the highest moment."""
        return self.peak.categories.total


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one device sends in one step, for one reason."""

    reason: str
    """why."""
    count: int
    """collectives or transfers a step."""
    num_bytes: float
    """bytes on the wire a step and device."""
    seconds: float
    """seconds at the link's rate, no overlap assumed."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the step fits on one device."""

    device: str
    """name."""
    usable_bytes: int
    """bytes for tensors."""
    fits: bool
    """whether the peak is at most that."""
    headroom_bytes: int
    """bytes left; negative where it does not fit."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a training step needs, from shapes alone."""

    model: str
    """what was estimated, in words."""
    checkpointing: str
    """policy, in the form that `parse_policy` reads."""
    num_parameters: int
    """parameters of the whole model."""
    num_trained: int
    """of them, those that are trained."""
    ranks: tuple[Rank, ...]
    """each kind of rank."""
    traffic: tuple[Traffic, ...]
    """communication of the busiest kind of rank, by reason."""
    fits: tuple[Fit, ...]
    """whether it fits, by device."""
    num_devices: int
    """devices of the whole run."""
    tokens: int
    """tokens a step in all replicas."""
    bubble: float
    """share of a pipeline's time in which a stage waits."""
    notes: tuple[str, ...] = ()
    """what was assumed, what has no effect, what to mind."""
    rule: dict[str, float] = msgspec.field(default_factory=dict)
    """the rule of thumb's numbers, where it was used."""

    @property
    def worst(self) -> Rank:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the highest moment of the fullest rank."""
        return self.worst.peak_bytes

    @property
    def categories(self) -> Categories:
        """By category, at that moment."""
        return self.worst.peak.categories

    @property
    def activation_bytes(self) -> int:
        """Bytes at the peak that checkpointing can change."""
        return self.categories.activations

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state on the fullest rank."""
        return self.categories.static

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations held after forward on the fullest rank."""
        return self.worst.kept_bytes

    @property
    def compute_units(self) -> float:
        """Operations of a step in units of one forward pass (3 without recomputation)."""
        slow = self._slowest
        return (slow.forward_flops + slow.backward_flops + slow.rebuilt_flops) / slow.forward_flops

    @property
    def recompute_overhead(self) -> float:
        """Operations that run again, as a share of a step without recomputation."""
        slow = self._slowest
        return slow.rebuilt_flops / (slow.forward_flops + slow.backward_flops)

    @property
    def time_overhead(self) -> float:
        """Share by which recomputation lengthens the step of the slowest rank, by the roofline."""
        without = max(rank.forward_seconds + rank.backward_seconds for rank in self.ranks)
        slow = self._slowest
        return (slow.forward_seconds + slow.backward_seconds + slow.rebuilt_seconds) / without - 1

    @property
    def step_seconds(self) -> float:
        """Seconds of a step by the roofline: compute of the slowest rank, its transfers, and the pipeline's bubble."""
        slow = self._slowest
        compute = slow.forward_seconds + slow.backward_seconds + slow.rebuilt_seconds
        outside = sum(t.seconds for t in self.traffic if not t.reason.startswith(("tensor", "expert", "context")))
        return (compute + outside) / (1 - self.bubble)

    @property
    def _slowest(self) -> Rank:
        return max(self.ranks, key=lambda rank: rank.forward_seconds + rank.backward_seconds + rank.rebuilt_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "model": self.model,
            "checkpointing": self.checkpointing,
            "num_parameters": self.num_parameters,
            "num_trained": self.num_trained,
            "num_devices": self.num_devices,
            "tokens": self.tokens,
            "peak_bytes": self.peak_bytes,
            "static_bytes": self.static_bytes,
            "activation_bytes": self.activation_bytes,
            "kept_bytes": self.kept_bytes,
            "categories": self.categories.as_dict(),
            "ranks": [_rank_dict(rank) for rank in self.ranks],
            "compute": {
                "units": self.compute_units,
                "recompute_overhead": self.recompute_overhead,
                "time_overhead": self.time_overhead,
                "step_seconds": self.step_seconds,
                "bubble": self.bubble,
            },
            "traffic": [
                {"reason": t.reason, "count": t.count, "bytes": t.num_bytes, "seconds": t.seconds} for t in self.traffic
            ],
            "fits": [
                {"device": f.device, "usable_bytes": f.usable_bytes, "fits": f.fits, "headroom_bytes": f.headroom_bytes}
                for f in self.fits
            ],
            "notes": list(self.notes),
            **({"rule": dict(self.rule)} if self.rule else {}),
        }


def _rank_dict(rank: Rank) -> dict[str, Any]:
    return {
        "name": rank.name,
        "stages": list(rank.stages),
        "layers": rank.layers,
        "in_flight": rank.in_flight,
        "peak_bytes": rank.peak_bytes,
        "peak_moment": rank.peak.name,
        "categories": rank.peak.categories.as_dict(),
        "moments": {m.name: m.categories.total for m in rank.moments},
        "kept_bytes": rank.kept_bytes,
        "host_bytes": rank.host_bytes,
        "forward_flops": rank.forward_flops,
        "backward_flops": rank.backward_flops,
        "rebuilt_flops": rank.rebuilt_flops,
    }
