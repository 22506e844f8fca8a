"""An upstream method, its pattern found in its own source, and a new function made of it.

The syntax tree finds the span; the text is what changes. Each edit is padded with blank lines, so every line that
stays keeps upstream's number, and a traceback or `inspect.getsource` shows the very text that runs.
"""

from __future__ import annotations
import __future__

import ast
import dataclasses
import difflib
import functools
import inspect
import linecache
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Sequence
from types import CellType, CodeType, FunctionType

from .errors import ForeignForwardError, SourceUnavailableError, UnexpectedSourceError

# What classwide.py has exchanged in this process, so that a method's source and code are always upstream's own.
ORIGINAL_CODE: dict[FunctionType, CodeType] = {}
ORIGINAL_FORWARD: dict[type, tuple[FunctionType, FunctionType]] = {}  # upstream's, and what stands there now

_FUTURE_FLAGS = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


@dataclasses.dataclass(frozen=True)
class Edit:
    """Lines `first` to `last` of upstream's file, counted from 1, give way to `lines` (never more of them).

    An edit of an expression changes only `columns`, from the one in the first line to the one before which it ends in
    the last, into `text`; so others may change the rest of these lines.
    """

    first: int
    last: int
    lines: tuple[str, ...]
    columns: tuple[int, int] | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of an upstream class.

    Attributes:
        owner: the class whose body defines the method.
        function: the innermost function, below every decorator.
        file: upstream's file, line by line, without line ends.
        first: number of the method's first line (its first decorator, if it has one), from 1.
        last: number of its last line.
        tree: its syntax tree; positions are those of upstream's file.
    """

    owner: type
    function: FunctionType
    file: tuple[str, ...]
    first: int
    last: int
    tree: ast.FunctionDef

    @classmethod
    def of(cls, owner: type, name: str = "forward") -> Method:
        """Reads a method's source and checks that it is the source of the code that runs.

        Raises:
            ForeignForwardError: the method is not upstream's own function.
            SourceUnavailableError: there is no source, or another than the one that was compiled.
        """
        function = innermost(upstream_function(owner, name))
        if function.__module__ != owner.__module__:
            raise ForeignForwardError(
                f"{_where(owner)}.{name} has been replaced by {function.__module__}.{function.__qualname__}: "
                "undo that other patch first, or leave this one out"
            )
        code = ORIGINAL_CODE.get(function, function.__code__)
        try:
            path = inspect.getsourcefile(owner) or code.co_filename
            lines = tuple(line.rstrip("\n") for line in linecache.getlines(path, function.__globals__))
            first = code.co_firstlineno
            last = first - 1 + len(inspect.getblock([line + "\n" for line in lines[first - 1 :]]))
            tree = _parse(owner, lines, first, last)
            same = _same_code(_compile(owner, lines, first, last, code, path, _imported_names(lines)), code)
        except (SyntaxError, tokenize.TokenError, LookupError, TypeError, ValueError, OSError) as error:
            raise SourceUnavailableError(_no_source(owner, name, f"its source cannot be read ({error})")) from error
        if not same:
            raise SourceUnavailableError(_no_source(owner, name, "its source file is not what was compiled"))
        return cls(owner, function, lines, first, last, tree)

    @property
    def path(self) -> str:
        """Upstream's file."""
        return inspect.getsourcefile(self.owner) or self._code.co_filename

    @property
    def _code(self) -> CodeType:
        return ORIGINAL_CODE.get(self.function, self.function.__code__)

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        """The edit that puts `text` (one line) in the place of an expression, or of a simple statement."""
        last = node.end_lineno or node.lineno
        # Columns count bytes of UTF-8.
        before = self.file[node.lineno - 1].encode()[: node.col_offset].decode()
        after = self.file[last - 1].encode()[node.end_col_offset :].decode()
        columns = len(before), len(self.file[last - 1]) - len(after)
        return Edit(node.lineno, last, (before + text + after,), columns, text)

    def drop(self, statement: ast.stmt) -> Edit:
        """The edit that takes a whole statement away, with the comment above it and the blank line it leaves."""
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        indent = self.file[first - 1][: statement.col_offset]
        if any(suite == [statement] for suite in _suites(self.tree)):
            return Edit(first, last, (f"{indent}pass",))
        while first - 1 > self.first and self.file[first - 2].startswith(f"{indent}#"):
            first -= 1
        if last < self.last and not self.file[last].strip() and not self.file[first - 2].strip():
            last += 1
        return Edit(first, last, ())

    def edited(self, edits: Iterable[Edit], label: str) -> FunctionType:
        """A new innermost function: upstream's with `edits`, in the same globals, defaults and closure.

        `label` names it in tracebacks, behind upstream's file name.

        Raises:
            UnexpectedSourceError: an edit lies outside the method or adds lines, two edits overlap, the result does not
            compile, or it needs a closure that upstream's function has not.
        """
        edits = list(edits)
        for edit in edits:
            inside = isinstance(edit, Edit) and self.first <= edit.first <= edit.last <= self.last
            if not inside or len(edit.lines) > edit.last - edit.first + 1:
                raise UnexpectedSourceError(f"{edit!r} does not fit into lines {self.first} to {self.last}")
        # With the class in it, since another class of the same file may have its edits too.
        path = f"{self.path} [t5fastpatch: {label} on {self.owner.__name__}]"
        lines = apply_edits(self.file, edits, pad=True)
        try:
            imported = _imported_names(self.file)
            code = _compile(self.owner, lines, self.first, self.last, self._code, path, imported)
        except (SyntaxError, LookupError) as error:
            raise UnexpectedSourceError(f"{label} on {_where(self.owner)} gives no valid source: {error}") from error
        if code.co_freevars != self._code.co_freevars:
            raise UnexpectedSourceError(f"{label} on {_where(self.owner)} adds or drops a use of super()")
        # No modification time: linecache then keeps the entry, since no file on disk can outdate it.
        linecache.cache[path] = (sum(map(len, lines)), None, [line + "\n" for line in lines], path)
        upstream = self.function
        new = FunctionType(code, upstream.__globals__, upstream.__name__, upstream.__defaults__, upstream.__closure__)
        return _like(upstream, new)


def apply_edits(file: Sequence[str], edits: Iterable[Edit], *, pad: bool) -> list[str]:
    """The file's lines after `edits`; with `pad`, blank lines keep every other line at its number.

    Raises:
        UnexpectedSourceError: two edits overlap.
    """
    lines: list[str] = []
    done = 0
    for edit in _joined(file, edits):
        lines += file[done : edit.first - 1]
        lines += edit.lines
        if pad:
            lines += [""] * (edit.last - edit.first + 1 - len(edit.lines))
        done = edit.last
    return lines + list(file[done:])


def _joined(file: Sequence[str], edits: Iterable[Edit]) -> list[Edit]:
    """The edits in order, those that share a line as one."""
    joined: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.first, edit.columns or (0, 0))):
        if joined and edit.first <= joined[-1].last:
            edit = _join(file, joined.pop(), edit)
        joined.append(edit)
    return joined


def _join(file: Sequence[str], one: Edit, other: Edit) -> Edit:
    """Two edits of expressions that meet in one line, the first one's last and the other's first."""
    if one.columns is None or other.columns is None or (other.first, other.columns[0]) < (one.last, one.columns[1]):
        raise UnexpectedSourceError(f"two edits meet at line {other.first}")
    between = file[one.last - 1][one.columns[1] : other.columns[0]]
    before, after = file[one.first - 1][: one.columns[0]], file[other.last - 1][other.columns[1] :]
    text = one.text + between + other.text
    return Edit(one.first, other.last, (before + text + after,), (one.columns[0], other.columns[1]), text)


def unified_diff(file: Sequence[str], edits: Iterable[Edit], path: str) -> str:
    """The edits as a unified diff, with upstream's line numbers."""
    changed = apply_edits(file, edits, pad=False)
    return "\n".join(difflib.unified_diff(file, changed, f"a/{path}", f"b/{path}", lineterm=""))


def method_source(function: Callable[..., object], indent: str = "    ") -> tuple[str, ...]:
    """The lines of a module-level function as they would stand in a class body."""
    return tuple(textwrap.indent(inspect.getsource(function), indent).rstrip("\n").split("\n"))


def upstream_function(owner: type, name: str = "forward") -> FunctionType:
    """The function upstream put on the class, decorators and all.

    Raises:
        ForeignForwardError: it is no plain function.
    """
    function = vars(owner)[name]
    original, ours = ORIGINAL_FORWARD.get(owner, (function, function))
    if function is ours:
        function = original
    # Not isinstance: wrapt's wrappers claim to be functions.
    if type(function) is not FunctionType:
        raise ForeignForwardError(
            f"{_where(owner)}.{name} is a {type(function).__name__}, not a function: undo the wrapping, then patch"
        )
    return function


def innermost(function: FunctionType) -> FunctionType:
    """The function below every decorator that keeps `__wrapped__`.

    Raises:
        ForeignForwardError: what is there is no plain function.
    """
    inner = inspect.unwrap(function)
    if type(inner) is not FunctionType:
        raise ForeignForwardError(f"{function.__qualname__} wraps a {type(inner).__name__}: undo that, then patch")
    return inner


def rewrap(outer: FunctionType, old: FunctionType, new: FunctionType) -> FunctionType:
    """The decorated function `outer` again, with `new` in the place of the innermost `old`.

    Each wrapper is copied with its closure, in which the wrapped function, and the wrapper itself, are exchanged.

    Raises:
        ForeignForwardError: a wrapper keeps the function somewhere else than in its closure.
    """
    if outer is old:
        return new
    below: FunctionType = outer.__wrapped__  # type: ignore[attr-defined]
    replaced = rewrap(below, old, new)
    cells = tuple(CellType() for _ in outer.__closure__ or ())
    copy = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, cells)
    found = False
    for cell, original in zip(cells, outer.__closure__ or ()):
        try:
            content = original.cell_contents
        except ValueError:  # an empty cell stays empty
            continue
        found = found or content is below
        cell.cell_contents = replaced if content is below else copy if content is outer else content
    if not found:
        raise ForeignForwardError(
            f"{old.__module__}.{old.__qualname__} is wrapped by {outer.__module__}, which keeps it out of reach: "
            "undo that wrapper, then patch"
        )
    _like(outer, copy)
    copy.__wrapped__ = replaced  # type: ignore[attr-defined]
    return copy


def _like(upstream: FunctionType, new: FunctionType) -> FunctionType:
    """Gives `new` the name, signature, documentation and attributes of `upstream`."""
    functools.update_wrapper(new, upstream)
    # `inspect` would follow it and show upstream's source for ours.
    del new.__wrapped__  # type: ignore[attr-defined]
    new.__kwdefaults__ = upstream.__kwdefaults__
    return new


def _suites(tree: ast.AST) -> Iterable[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            suite = getattr(node, field, None)
            if isinstance(suite, list):
                yield suite


def _shell(owner: type, lines: Sequence[str], first: int, last: int) -> ast.Module:
    """The method alone, in a class of its name and at its line: private names, `super` and indentation hold there."""
    source = "\n" * (first - 2) + f"class {owner.__name__}:\n" + "\n".join(lines[first - 1 : last]) + "\n"
    return ast.parse(source)


def _parse(owner: type, lines: Sequence[str], first: int, last: int) -> ast.FunctionDef:
    (shell,) = _shell(owner, lines, first, last).body
    assert isinstance(shell, ast.ClassDef)
    for node in shell.body:
        if isinstance(node, ast.FunctionDef):
            return node
    raise LookupError("no function definition")


def _compile(
    owner: type, lines: Sequence[str], first: int, last: int, code: CodeType, path: str, imported: Iterable[str]
) -> CodeType:
    tree = _shell(owner, lines, first, last)
    # Python compiles a call on an imported name in its own way, so the shell imports what upstream's module does.
    names = [ast.alias(name) for name in imported]
    tree.body[:0] = [ast.Import(names, lineno=1, col_offset=0)] if names else []
    flags = code.co_flags & _FUTURE_FLAGS
    module = compile(ast.fix_missing_locations(tree), path, "exec", flags=flags, dont_inherit=True)
    for shell in _codes(module):
        for method in _codes(shell):
            if method.co_name == code.co_name and method.co_firstlineno == first:
                return method
    raise LookupError(f"no method {code.co_name} at line {first}")


@functools.cache
def _imported_names(file: tuple[str, ...]) -> tuple[str, ...]:
    """The names that a module's own scope gets from imports."""
    names: dict[str, None] = {}
    scope: list[ast.AST] = [ast.parse("\n".join(file))]
    while scope:
        node = scope.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= dict.fromkeys((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            scope += ast.iter_child_nodes(node)
    return tuple(names)


def _codes(code: CodeType) -> Iterable[CodeType]:
    return (const for const in code.co_consts if isinstance(const, CodeType))


def _same_code(a: CodeType, b: CodeType) -> bool:
    """Whether two code objects do the same; positions and file names aside."""
    fields = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(a, field) != getattr(b, field) for field in fields) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same_code(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else type(x) is type(y) and x == y
        for x, y in zip(a.co_consts, b.co_consts)
    )


def _where(owner: type) -> str:
    return f"{owner.__module__}.{owner.__qualname__}"


def _no_source(owner: type, name: str, why: str) -> str:
    return (
        f"cannot read {_where(owner)}.{name}: {why}. Source patches need transformers installed with its .py files, "
        "unchanged since they were imported"
    )
