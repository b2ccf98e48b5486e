"""Where a result comes from: which code, which libraries, which command.

A worker notes in ``Result.environment`` what its numbers and times depend on: versions, the commit
of a checkout, the device. The launcher notes in ``Result.provenance`` how it was asked for, and
the hashes of the user's own code.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import normkit
from normkit.lab.experiment import Run
from normkit.lab.results import Result

LIBRARIES = ("torchvision", "timm", "numpy", "triton", "torchmetrics", "datasets")
GIT_TIMEOUT = 10.0  # seconds


@cache
def software() -> dict[str, str]:
    """Versions of what computes, as they are installed; nothing is imported for it."""
    versions = {"normkit": normkit.__version__}
    if commit := checkout_commit(Path(normkit.__file__).parent):
        versions["commit"] = commit
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def checkout_commit(package: Path) -> str:
    """The commit of the checkout that a package runs from; "" where it was installed."""
    if len(package.parents) < 2 or not (root := package.parents[1]).joinpath(".git").exists():
        return ""
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src")
    return f"{commit[:12]}{' with changes' if commit and changed else ''}"


def _git(root: Path, *arguments: str) -> str:
    """What git prints; "" if it is not installed, or refuses."""
    command = ["git", "-C", str(root), *arguments]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT, env=quiet, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def command_line() -> str:
    """The command as one would type it again."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if program in ("__main__.py", "-c", "-m"):
        program = "python -m normkit" if program == "__main__.py" else "python"
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def with_provenance(result: Result, run: Run) -> Result:
    """A result with the command of this process and the hashes of the user's own code."""
    facts = {"command": command_line()}
    if hashes := run.setting.code.hashes:
        facts["code"] = ", ".join(f"{name} {value}" for name, value in hashes.items())
    return dataclasses.replace(result, provenance={**facts, **result.provenance})
