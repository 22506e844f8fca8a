"""A model of the cost: the time of a call on a GPU, predicted from its census. Nothing here is measured."""

from __future__ import annotations

import dataclasses
import enum

from ...errors import T5FastPatchError
from ..census.operations import Operation
from ..census.work import Work
from .devices import Device


@dataclasses.dataclass(frozen=True)
class Costs:
    """What each step costs whatever its size, in seconds: assumptions, for eager PyTorch; docs/cost-model.md says why.

    Attributes:
        operation: of the host, from the Python call to the launched kernel.
        view: of the host, for an operation that allocates and launches nothing.
        kernel: of the device, beside what the kernel moves and computes.
        sync: from the end of the device's work to that of its next kernel's launch, while host and device both wait.
    """

    operation: float = 7.5e-6
    view: float = 2.5e-6
    kernel: float = 2e-6
    sync: float = 10e-6


ASSUMED = Costs()


class Bound(enum.Enum):
    """What a call's time mostly depends on."""

    LAUNCH = "launch"
    BANDWIDTH = "bandwidth"
    COMPUTE = "compute"


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted time, in seconds.

    Attributes:
        host: what the host needs to launch everything.
        device: what the device needs to run everything.
        syncs: what both lose where the host waits for the device.
        bound: what `seconds` mostly depends on.
    """

    host: float
    device: float
    syncs: float
    bound: Bound

    @property
    def seconds(self) -> float:
        """Host and device work at the same time, the slower one sets the pace; at a synchronisation neither works."""
        return max(self.host, self.device) + self.syncs


def predict(work: Work, device: Device, *, tf32: bool = False, costs: Costs = ASSUMED) -> Prediction:
    """The time that a call would take on a device.

    A kernel takes the longer of moving its bytes and making its FLOPs at the device's peak rates: the roofline model
    of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
    Communications of the ACM 52(4), 2009, https://doi.org/10.1145/1498765.1498785.

    Args:
        work: a census, or a part of one.
        device: one of `DEVICES`.
        tf32: whether products of fp32 run on tensor cores, where the device has tf32.
        costs: per operation, view, kernel and synchronisation.

    Raises:
        T5FastPatchError: the device has no rate for a product's dtype.
    """
    time = {Bound.LAUNCH: 0.0, Bound.BANDWIDTH: 0.0, Bound.COMPUTE: 0.0}
    for kernel, count in work.kernels.items():
        moving, computing = _moving(kernel, device), _computing(kernel, device, tf32)
        time[Bound.COMPUTE if computing > moving else Bound.BANDWIDTH] += count * max(moving, computing)
        time[Bound.LAUNCH] += count * costs.kernel
    host = work.ops * costs.operation + work.views.total() * costs.view
    on_device = sum(time.values())
    bound = Bound.LAUNCH if host >= on_device else max(time, key=lambda each: time[each])
    return Prediction(host, on_device, work.syncs * costs.sync, bound)


def _moving(kernel: Operation, device: Device) -> float:
    return (kernel.bytes_read + kernel.bytes_written) / device.bandwidth.per_second


def _computing(kernel: Operation, device: Device, tf32: bool) -> float:
    if not kernel.flops:
        return 0.0
    dtype = "tf32" if tf32 and kernel.dtype == "float32" and "tf32" in device.rates else kernel.dtype
    if dtype not in device.rates:
        raise T5FastPatchError(f"{device.name} has no rate for {dtype} products: it has {', '.join(device.rates)}")
    return kernel.flops / device.rates[dtype].per_second
