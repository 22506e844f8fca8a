"""The checks: `nox` runs what every push is checked with; `nox -s releases` the tests on all releases of transformers.

All sessions use the environment they are started in: torch is large, and one copy serves every release.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))

from scripts.releases import RELEASES, environment

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "none"

ON_EVERY_PUSH = ("4.26.1", "4.57.6", "5.24.0")


def run_tests(session: nox.Session, releases: tuple[str, ...]) -> None:
    for release in releases:
        session.log(f"transformers {release}")
        session.run(sys.executable, "-m", "pytest", *session.posargs, env=environment(release))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: lint and format."""
    session.run(sys.executable, "-m", "ruff", "check", ".")
    session.run(sys.executable, "-m", "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy on the package."""
    session.run(sys.executable, "-m", "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests on the releases that every push is tested on."""
    run_tests(session, ON_EVERY_PUSH)


@nox.session
def releases(session: nox.Session) -> None:
    """The tests on all releases."""
    run_tests(session, RELEASES)
