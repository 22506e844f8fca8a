"""The command line. Errors of this package are one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__
from .cli_ablate import ablate
from .cli_check import check
from .cli_compare import compare
from .cli_predict import predict
from .cli_profile import profile
from .cli_report import report
from .errors import NotFoundError, T5FastPatchError
from .families import FAMILIES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Makes Hugging Face T5 models run in half precision as they should, patch by patch.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"t5fastpatch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command("list")
def list_() -> None:
    """List the patches and their contracts."""
    from .registry import PRESETS, list_patches

    patches = list_patches()
    table = Table("patch", "what it replaces", "contract", "presets")
    for patch in patches:
        presets = ", ".join(name for name, has in PRESETS.items() if name != "all" and has(patch))
        name = f"{patch.name} *" if patch.unsafe_alone else patch.name
        table.add_row(*map(Text, (name, patch.summary, patch.contract.value, presets)))
    console = Console()
    console.print(table)
    console.print(Text("* A preset puts it on only where the model has a proof of headroom:"), soft_wrap=True)
    for patch in patches:
        if patch.unsafe_alone:
            console.print(Text(f"  {patch.name}: {patch.unsafe_alone}."), soft_wrap=True)


@app.command()
def status(
    model: Annotated[str, typer.Option(help="A folder with a config.json, or a model's name on the hub.")],
) -> None:
    """Say what each patch would do to a model. Reads its configuration only, no weights."""
    from .engine import status as status_of
    from .loading import from_config

    print(status_of(from_config(model)))
    print("Without its weights nothing is proven of the model: t5fastpatch check says what they prove.")


@app.command()
def show(
    patch: Annotated[str, typer.Argument(help="The patch's name.")],
    family: Annotated[str | None, typer.Option(help="One family, t5 say; all without it.")] = None,
) -> None:
    """Print a patch as a unified diff against the installed transformers."""
    from .diff import diff
    from .registry import get_patch

    if family is not None and family not in FAMILIES:
        raise NotFoundError(f"there is no family {family!r}: there are {', '.join(FAMILIES)}")
    print(diff(get_patch(patch), [FAMILIES[family]] if family else list(FAMILIES.values())))


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_(
    target: Annotated[str, typer.Argument(help="A script, or with -m a module.")],
    args: Annotated[list[str] | None, typer.Argument(help="The program's own arguments.")] = None,
    patches: Annotated[str | None, typer.Option(help="Names, with commas; else T5FASTPATCH, else 'safe'.")] = None,
    module: Annotated[bool, typer.Option("-m", help="The target is a module.")] = False,
) -> None:
    """Run an unmodified program with patches on, process-wide."""
    raise _Program(target, args or [], module, patches)


class _Program(Exception):
    """Ends the command line: what `run` is to start runs outside of it, where nothing handles the program's errors."""


for command in (ablate, check, predict, profile, report, compare):
    app.command()(command)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line with `argv` (`sys.argv[1:]` without it) and returns the exit code."""
    excepthook = sys.excepthook
    try:
        app(argv)
    except T5FastPatchError as error:
        return _report_error(error)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        raise
    except _Program as program:
        target, args, module, patches = program.args
    else:
        return 0
    finally:
        sys.excepthook = excepthook  # which typer has replaced
    return _launch(target, args, module, patches)


def entry() -> None:
    """The console script."""
    sys.exit(main())


def _launch(target: str, args: list[str], module: bool, patches: str | None) -> int:
    from .launcher import check, run

    try:
        check(target, module=module, patches=patches)
    except T5FastPatchError as error:
        return _report_error(error)
    run(target, args, module=module, patches=patches)
    return 0


def _report_error(error: T5FastPatchError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2
