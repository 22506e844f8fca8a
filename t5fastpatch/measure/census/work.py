"""What a call, or one module in it, did: the figures of a census."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .operations import Operation


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations, views and synchronisations, and what follows from them.

    Attributes:
        operations: those that are no views; `rms_norm` and `scaled_dot_product_attention` count as one operation each,
            as they are one kernel on CUDA.
        leaf_by_op: their number by name (`"mul.Tensor"`), with those two decomposed into what this device runs.
        views: the number of views by name.
        sync_sites: where the host waits for a result on a device, as `"modeling_t5.py:123 forward"`: `.item()`,
            `bool()`, `.tolist()`, `nonzero`, indexing with a boolean mask, `torch.equal` and the like. They are counted
            on any device, the CPU too; copies to the host only where there is another device to copy from.
    """

    operations: Counter[Operation] = dataclasses.field(default_factory=Counter)
    leaf_by_op: Counter[str] = dataclasses.field(default_factory=Counter)
    views: Counter[str] = dataclasses.field(default_factory=Counter)
    sync_sites: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def by_op(self) -> Counter[str]:
        """Operations by name, views left out, the two composites as one each."""
        found: Counter[str] = Counter()
        for operation, count in self.operations.items():
            found[operation.name] += count
        return found

    @property
    def kernels(self) -> Counter[Operation]:
        """The operations that a device has something to do for."""
        return Counter({operation: count for operation, count in self.operations.items() if operation.is_kernel})

    @property
    def ops(self) -> int:
        """Operations, views left out, the two composites as one each."""
        return self.operations.total()

    @property
    def leaf_ops(self) -> int:
        """Operations, views left out, the two composites decomposed."""
        return self.leaf_by_op.total()

    @property
    def casts(self) -> int:
        """Copies into another dtype, `_to_copy` and `copy_`; those inside the two composites are not counted."""
        return self._sum("is_cast")

    @property
    def syncs(self) -> int:
        """How often the host waits for a result on a device."""
        return self.sync_sites.total()

    @property
    def host_scalars(self) -> int:
        """Those of the operations that make a zero-dimensional CPU tensor of a Python number.

        With the model on CUDA, the ones that follow their neighbours' device are filled there by a kernel.
        """
        return self._sum("is_host_scalar")

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that the operations read; see `traffic.traffic`."""
        return self._sum("bytes_read")

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors that the operations write; see `traffic.traffic`."""
        return self._sum("bytes_written")

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, those of attention among them."""
        return self._sum("flops")

    @property
    def flops_by_dtype(self) -> Counter[str]:
        """`flops` by the dtype of the product's result."""
        found: Counter[str] = Counter()
        for operation, count in self.operations.items():
            if operation.flops:
                found[operation.dtype] += operation.flops * count
        return found

    @property
    def fp32_share(self) -> float | None:
        """The share of `flops` that runs in fp32, from 0 to 1; `None` where there is no product."""
        return self.flops_by_dtype["float32"] / self.flops if self.flops else None

    def _sum(self, figure: str) -> int:
        return sum(int(getattr(operation, figure)) * count for operation, count in self.operations.items())

    def __add__(self, other: Work) -> Work:
        return Work(
            self.operations + other.operations,
            self.leaf_by_op + other.leaf_by_op,
            self.views + other.views,
            self.sync_sites + other.sync_sites,
        )

    def figures(self) -> dict[str, int]:
        """Every sum, by name."""
        return {
            "ops": self.ops,
            "leaf_ops": self.leaf_ops,
            "views": self.views.total(),
            "casts": self.casts,
            "syncs": self.syncs,
            "host_scalars": self.host_scalars,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "flops": self.flops,
        }

    def difference(self, other: Work) -> dict[str, int]:
        """By name, how many more of an operation this has than `other`; equal counts are left out."""
        return _more(self.by_op, other.by_op)

    def figures_difference(self, other: Work) -> dict[str, int]:
        """By name, how much larger a figure of `figures` is than `other`'s; equal ones are left out."""
        return _more(self.figures(), other.figures())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and numbers, operations by falling count; single operations as sums only."""
        return {
            **self.figures(),
            "flops_by_dtype": dict(self.flops_by_dtype),
            "fp32_share": self.fp32_share,
            "by_op": dict(self.by_op.most_common()),
            "leaf_by_op": dict(self.leaf_by_op.most_common()),
            "sync_sites": dict(self.sync_sites.most_common()),
        }


@dataclasses.dataclass(frozen=True)
class Census(Work):
    """What one call did, in all and by module.

    Attributes:
        by_module: what each module did itself, without the modules in it, by its path
            (`"decoder.block.0.layer.1.EncDecAttention"`); `""` holds what no named module did.
    """

    by_module: Mapping[str, Work] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, by_module: Mapping[str, Work]) -> Census:
        """The census of a call whose modules did this."""
        total = _sum(by_module.values())
        return cls(total.operations, total.leaf_by_op, total.views, total.sync_sites, by_module)

    def within(self, path: str) -> Work:
        """What the module at `path` did, the modules in it included; nothing at all where no such module ran."""
        return _sum(
            work for each, work in self.by_module.items() if not path or each == path or each.startswith(f"{path}.")
        )

    def module_difference(self, other: Census) -> dict[str, dict[str, int]]:
        """By module, `figures_difference` of what it did itself; modules without a difference are left out."""
        paths = sorted({*self.by_module, *other.by_module})
        nothing = Work()
        differences = {
            path: self.by_module.get(path, nothing).figures_difference(other.by_module.get(path, nothing))
            for path in paths
        }
        return {path: difference for path, difference in differences.items() if difference}

    def to_dict(self) -> dict[str, Any]:
        """As of `Work`, with the same for each module under `by_module`."""
        return {**super().to_dict(), "by_module": {path: work.to_dict() for path, work in self.by_module.items()}}


def _sum(works: Iterable[Work]) -> Work:
    return sum(works, Work())


def _more(these: Mapping[str, int], those: Mapping[str, int]) -> dict[str, int]:
    names = sorted({*these, *those})
    return {name: more for name in names if (more := these.get(name, 0) - those.get(name, 0))}
