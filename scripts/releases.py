"""The releases of transformers that are tested, and a way to have each beside the torch that is installed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RELEASES = ("4.26.1", "4.30.2", "4.41.2", "4.48.3", "4.57.6", "5.0.0", "5.12.1", "5.17.0", "5.24.0")


def environment(release: str) -> dict[str, str]:
    """The environment variables under which Python finds a release, and nothing asks a hub."""
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if release != importlib.metadata.version("transformers"):
        folders.insert(0, str(_install(release)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), "HF_HUB_OFFLINE": "1"}


def _install(release: str) -> Path:
    """A folder with the release and what it needs; filled from the package index the first time."""
    folder = ROOT / ".nox" / "releases" / release
    if not (folder / "done").exists():
        packages = [f"transformers=={release}", "sentencepiece"]
        if tuple(map(int, release.split(".")[:2])) < (4, 45):  # their code and wheels expect numpy 1
            packages.append("numpy<2")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, *packages], check=True)
        (folder / "done").touch()
    return folder
