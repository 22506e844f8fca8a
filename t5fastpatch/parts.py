"""The T5 parts of a model: its modules, the upstream classes whose forwards they run, and its stacks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .classwide import process_wide
from .errors import MetaDeviceError, NotT5Error, WrongTypeError
from .families import FAMILIES, role_of
from .findings import Survey, survey, upstream_class
from .headroom.places import Scaling
from .headroom.stacks import Stack, stacks_of
from .install import patches_on, setup_on
from .patch import Patch, SourcePatch, StackPatch


@dataclasses.dataclass(frozen=True)
class Parts:
    """The modules of the T5 family in a model, each with the upstream class whose forward it runs.

    `strangers` are modules of classes that derive from upstream's and bring a forward of their own.
    """

    name: str
    roots: list[nn.Module]
    modules: list[tuple[nn.Module, type]]
    strangers: list[tuple[nn.Module, type]]
    stacks: dict[nn.Module, list[Stack]]

    @classmethod
    def of(cls, model: Any) -> Parts:
        name, roots = type(model).__name__, _roots(model)
        modules, strangers = [], []
        for module in dict.fromkeys(module for root in roots for module in root.modules()):
            upstream = upstream_class(type(module))
            if upstream is not None:
                modules.append((module, upstream))
            else:
                strangers += [(module, base) for base in inspect.getmro(type(module)) if role_of(base)][:1]
        if not modules and not strangers:
            raise NotT5Error(f"this {name} has no module of the T5 family ({', '.join(FAMILIES)})")
        return cls(name, roots, modules, strangers, {root: found for root in roots if (found := stacks_of(root))})

    @functools.cached_property
    def every_stack(self) -> list[Stack]:
        """The stacks of all roots."""
        return [stack for found in self.stacks.values() for stack in found]

    @functools.cached_property
    def _stack_of(self) -> dict[nn.Module, Stack]:
        return {module: stack for stack in self.every_stack for module in stack.module.modules()}

    def stack(self, module: nn.Module) -> Stack | None:
        """The stack that a module is part of, if it is of one."""
        return self._stack_of.get(module)

    def watched(self) -> list[nn.Module]:
        """Every module whose weights a proof is about."""
        return [module for root in self.roots for module in root.modules()]

    def patches_within(self, stack: Stack) -> set[Patch]:
        """The patches that are on any module of a stack."""
        return {patch for module in stack.module.modules() for patch in patches_on(module)}

    def scaling(self, stack: Stack) -> Scaling:
        return setup_on(stack.module).scaling

    def surveys(self, patches: Iterable[Patch]) -> dict[Patch, Survey]:
        return {patch: survey(patch, (cls for _, cls in self.modules)) for patch in patches}

    def on(self) -> list[Patch]:
        """The patches that are on any of the modules, for this model or for the process."""
        found = (patch for module, cls in self.modules for patch in (*patches_on(module), *process_wide(cls)))
        return list(dict.fromkeys(found))

    def check_device(self) -> None:
        # With accelerate's offloading the weights are on the meta device between two calls, and a hook brings them.
        hooked = any(hasattr(module, "_hf_hook") for root in self.roots for module in root.modules())
        meta = any(each.is_meta for module, _ in self.modules for each in module.parameters(recurse=False))
        if meta and not hooked:
            raise MetaDeviceError(f"this {self.name} is on the meta device: load its weights, then apply")

    def has_place(self, patch: Patch, module: nn.Module, cls: type, found: Survey) -> bool:
        """Whether a module is one that the patch would change."""
        if cls not in found.classes or not isinstance(patch, StackPatch):
            return cls in found.classes and (not isinstance(patch, SourcePatch) or patch.where(module))
        stack, role = self.stack(module), role_of(cls)
        assert role is not None
        where = patch.parts[role].where
        return stack is not None and (where is None or where(stack, module))


def _roots(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    components = getattr(model, "components", None)
    held = list(components.values()) if isinstance(components, Mapping) else [getattr(model, "model", None)]
    roots = list(dict.fromkeys(each for each in held if isinstance(each, nn.Module)))
    if not roots:
        raise WrongTypeError(
            f"a model is a torch.nn.Module, or holds one as .model or .components, not a {type(model).__name__}"
            + (": load it first" if isinstance(model, str) else "")
        )
    return roots
