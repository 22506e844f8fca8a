"""What counts as T5 here: the families, their modules, and the classes that play each role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .patch import Role


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family of transformers.

    Attributes:
        name: its folder under `transformers.models`.
        roles: the class names that play each role; a release may lack some of them.
    """

    name: str
    roles: Mapping[Role, tuple[str, ...]]

    @property
    def module(self) -> str:
        """The full name of the module that defines the family's classes."""
        return f"transformers.models.{self.name}.modeling_{self.name}"


def _family(name: str, prefix: str, **roles: tuple[str, ...]) -> Family:
    """A family whose class names are T5's behind a prefix, but for the roles that are given."""
    names = {
        Role.STACK: ("Stack",),
        Role.BLOCK: ("Block",),
        Role.ATTENTION: ("Attention",),
        Role.FEED_FORWARD: ("DenseActDense", "DenseGatedActDense"),
        Role.EXPERTS: ("SparseMLP",),
        Role.NORM: ("LayerNorm",),
        Role.GENERATOR: ("ForConditionalGeneration",),
    }
    names |= {Role[role.upper()]: given for role, given in roles.items()}
    return Family(name, {role: tuple(prefix + kind for kind in kinds) for role, kinds in names.items()})


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _family("t5", "T5"),
        _family("mt5", "MT5"),
        _family("umt5", "UMT5"),
        _family("longt5", "LongT5", attention=("Attention", "LocalAttention", "TransientGlobalAttention")),
        _family("switch_transformers", "SwitchTransformers"),
        _family(
            "pix2struct",
            "Pix2Struct",
            stack=("TextModel", "VisionModel"),
            block=("TextBlock",),
            attention=("TextAttention", "VisionAttention"),
            feed_forward=("TextDenseGatedActDense", "VisionMlp"),
        ),
        _family("udop", "Udop"),
        _family("pop2piano", "Pop2Piano"),
    )
}

_BY_MODULE = {family.module: family for family in FAMILIES.values()}


def family_of(cls: type) -> Family | None:
    """The family whose module defines `cls`, if one does."""
    return _BY_MODULE.get(cls.__module__)


def role_of(cls: type) -> Role | None:
    """The role that `cls` plays in its family, if it plays one."""
    family = family_of(cls)
    if family is not None:
        for role, names in family.roles.items():
            if cls.__name__ in names:
                return role
    return None
