"""What a patch is: a pattern in upstream's classes, what takes its place, and what it promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .errors import T5FastPatchError, UnexpectedSourceError
from .rewrite import Edit, Method

if TYPE_CHECKING:
    from torch import nn

    from .headroom.places import Place
    from .headroom.stacks import Stack


class Contract(str, Enum):
    """How a patched model's results relate to the stock model's."""

    EXACT = "exact"
    ROUNDING = "rounding"
    EXACT_IN_FP32 = "exact-in-fp32"


class Role(str, Enum):
    """The part a class plays in a T5 model; families.py says which class plays it in which family."""

    STACK = "stack"
    BLOCK = "block"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EXPERTS = "experts"
    NORM = "norm"
    GENERATOR = "generating model"


class State(str, Enum):
    """What can be said of a patch and a model, or a class."""

    ON = "on"
    APPLIES = "applies"
    UPSTREAM = "already upstream"
    ABSENT = "absent"
    NEEDLESS = "not needed"
    UNSAFE = "unsafe"
    REFUSED = "refused"
    CONFLICT = "conflicts"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a patch found in one upstream method.

    Attributes:
        state: `APPLIES`, `UPSTREAM`, `ABSENT` or `REFUSED`.
        edits: the edits to the method's source, for a patch on code inside a method.
        forward: the function to stand in the method's place, for a patch on a whole small module.
        members: what the class gets beside its forward: functions that the edits call, properties.
        around: makes the new outermost forward of the one that the edits gave.
        refusal: for a refusal, the error that says what was found instead.
        why: of an absent pattern, what the class does not have.
    """

    state: State
    edits: tuple[Edit, ...] = ()
    forward: Callable[..., Any] | None = None
    members: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    around: Callable[[FunctionType], FunctionType] | None = None
    refusal: T5FastPatchError | None = None
    why: str = ""

    @property
    def sites(self) -> int:
        """How many places of an upstream class change."""
        return len(self.edits) + (self.forward is not None) or int(bool(self.members))


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """A patch; use `SourcePatch`, `ForwardPatch`, `MethodPatch` or `StackPatch`.

    Attributes:
        name: a lower-case identifier.
        summary: one line, what replaces what.
        contract: how the patched result relates to stock's.
        conflicts: names of patches that cannot be on the same model.
        unsafe_alone: why the patch is applied only where the model has a proof of headroom, or by name; empty where it
            is safe on every model.
        needs_proof: whether a name is not enough.
        covers: names of patches whose work it does as well, in the methods that it changes: there, their edits are
            left out.
        attach, detach: what else happens to a module when the patch comes and goes; `detach` undoes `attach` to the
            bit.
    """

    name: str
    summary: str
    contract: Contract
    conflicts: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)
    unsafe_alone: str = dataclasses.field(default="", kw_only=True)
    needs_proof: bool = dataclasses.field(default=False, kw_only=True)
    covers: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)
    attach: Callable[[nn.Module], None] = dataclasses.field(default=lambda module: None, kw_only=True)
    detach: Callable[[nn.Module], None] = dataclasses.field(default=lambda module: None, kw_only=True)

    @property
    def roles(self) -> frozenset[Role]:
        """The roles of the classes that it looks at."""
        raise NotImplementedError

    @property
    def rewritten(self) -> frozenset[Role]:
        """The roles in whose forward it changes something."""
        return self.roles

    def find(self, method: Method, role: Role) -> Finding:
        """Looks for the pattern in one method; never changes anything."""
        raise NotImplementedError


def _found(name: str, method: Method, edits: list[Edit], sites: int | tuple[int, ...]) -> Finding:
    """What has been found, once the edits are counted and known to give a function."""
    if not edits:
        return Finding(State.UPSTREAM)
    expected = sites if isinstance(sites, tuple) else (sites,)
    if len(edits) not in expected:
        known = " or ".join(map(str, expected))
        raise UnexpectedSourceError(f"number of places found: {len(edits)}, expected: {known}")
    method.edited(edits, name)
    return Finding(State.APPLIES, edits=tuple(edits))


@dataclasses.dataclass(frozen=True, eq=False)
class SourcePatch(Patch):
    """A patch on code inside a method.

    Attributes:
        role: the classes it looks at.
        edits: gives the edits for a method, or raises `UnexpectedSourceError` where the source is like the pattern
            but not the pattern. No edits means that upstream no longer has it.
        sites: how many edits a method must give; several numbers where upstream writes the pattern in several ways.
        members: functions that the new text calls on `self`; their names begin with "t5fastpatch_".
        where: whether a module, as it is now, has what the patch replaces; every module of the role, if not given.
        more_roles: other classes that it looks at, for what has to change there too.
    """

    role: Role
    edits: Callable[[Method], list[Edit]]
    sites: int | tuple[int, ...]
    members: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)
    where: Callable[[nn.Module], bool] = dataclasses.field(default=lambda module: True, kw_only=True)
    more_roles: frozenset[Role] = dataclasses.field(default=frozenset(), kw_only=True)

    @property
    def roles(self) -> frozenset[Role]:
        return self.more_roles | {self.role}

    def find(self, method: Method, role: Role) -> Finding:
        """As `Patch.find`; a count other than `sites` or none is a refusal."""
        try:
            found = _found(self.name, method, list(self.edits(method)), self.sites)
        except UnexpectedSourceError as error:
            return Finding(State.REFUSED, refusal=error)
        return dataclasses.replace(found, members=self.members) if found.edits else found


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPatch(Patch):
    """A patch that brings its own forward for a whole small module.

    Attributes:
        role: the classes it looks at.
        forward: the new method, a module-level function with upstream's signature.
        upstream_has_it: whether upstream's method does already what the patch does.
        objection: why the new forward may not stand in for upstream's here, found by running both; empty if it may.
    """

    role: Role
    forward: Callable[..., Any]
    upstream_has_it: Callable[[Method], bool]
    objection: Callable[[Method], str]

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({self.role})

    def find(self, method: Method, role: Role) -> Finding:
        """As `Patch.find`; an objection is a refusal."""
        if self.upstream_has_it(method):
            return Finding(State.UPSTREAM)
        why = self.objection(method)
        if why:
            return Finding(State.REFUSED, refusal=UnexpectedSourceError(why))
        return Finding(State.APPLIES, forward=self.forward)


@dataclasses.dataclass(frozen=True, eq=False)
class MethodPatch(Patch):
    """A patch that puts methods over those that a class inherits, and leaves its forward alone.

    Attributes:
        role: the classes it looks at.
        methods: the new methods, by upstream's names; module-level functions that call what they stand over.
        lacks: what a class does not have that the methods need; empty if nothing is missing.
    """

    role: Role
    methods: Mapping[str, Callable[..., Any]]
    lacks: Callable[[type], str]

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({self.role})

    @property
    def rewritten(self) -> frozenset[Role]:
        return frozenset()

    def find(self, method: Method, role: Role) -> Finding:
        """As `Patch.find`; a class that lacks something is one where the pattern is absent."""
        why = self.lacks(method.owner)
        return Finding(State.ABSENT, why=why) if why else Finding(State.APPLIES, members=self.methods)


@dataclasses.dataclass(frozen=True)
class Part:
    """What a `StackPatch` does to the classes of one role.

    Attributes:
        edits: gives the edits for a method, as for `SourcePatch`; `None` for a part that has nothing to look for.
        sites: how many edits a method must give, as for `SourcePatch`; 0 for a part that leaves the source alone.
        optional: whether a release may do without the pattern; elsewhere its absence is a refusal.
        members: what the class gets beside its forward.
        around: makes the new outermost forward of the one that the edits gave.
        where: whether a module of a stack gets it; every module of the role, if not given.
    """

    edits: Callable[[Method], list[Edit]] | None = None
    sites: int | tuple[int, ...] = 0
    optional: bool = False
    members: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    around: Callable[[FunctionType], FunctionType] | None = None
    where: Callable[[Stack, nn.Module], bool] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class StackPatch(Patch):
    """A patch on whole stacks, in several roles at once.

    Attributes:
        parts: what it does, role by role.
        scales: the places whose sums and products it scales by powers of two, so that fp16 holds them; empty for none.
        wide: whether the residual stream is in fp32 under it.
        fallback_for: the patch that a preset tries first; this one is taken where that one was held back.
        needless: why a stack can do without it, as loaded; empty if it cannot.
        objection: why it may not be on a stack, whatever is known of its magnitudes; empty if it may.
        unpatched: what a pickle of the module holds, made of the module and its state: upstream's state.
    """

    parts: Mapping[Role, Part]
    scales: frozenset[Place] = dataclasses.field(default=frozenset(), kw_only=True)
    wide: bool = dataclasses.field(default=False, kw_only=True)
    fallback_for: str = dataclasses.field(default="", kw_only=True)
    needless: Callable[[Stack], str] = dataclasses.field(default=lambda stack: "", kw_only=True)
    objection: Callable[[Stack], str] = dataclasses.field(default=lambda stack: "", kw_only=True)
    unpatched: Callable[[nn.Module, dict[str, Any]], dict[str, Any]] = dataclasses.field(
        default=lambda module, state: state, kw_only=True
    )

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(self.parts)

    @property
    def rewritten(self) -> frozenset[Role]:
        return frozenset(role for role, part in self.parts.items() if part.sites)

    def find(self, method: Method, role: Role) -> Finding:
        """As `Patch.find`; that a part's pattern is missing is a refusal, unless the part is optional."""
        part = self.parts[role]
        try:
            edits = [] if part.edits is None else list(part.edits(method))
            if edits:
                found = _found(self.name, method, edits, part.sites)
            elif part.sites and not part.optional:
                raise UnexpectedSourceError(f"number of places found: 0, expected: {part.sites}")
            else:
                found = Finding(State.UPSTREAM if part.sites else State.APPLIES)
        except UnexpectedSourceError as error:
            return Finding(State.REFUSED, refusal=error)
        if found.state is State.UPSTREAM:
            return found
        return dataclasses.replace(found, members=part.members, around=part.around)


def depends_on_weights(patch: Patch, named: bool) -> bool:
    """Whether a patch is decided model by model, and cannot be put on a class for the whole process."""
    return isinstance(patch, StackPatch) or (bool(patch.unsafe_alone) and not named)
