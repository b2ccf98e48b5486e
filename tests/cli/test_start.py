"""Help pages and usage errors do not wait for torch, and say what the library says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import normkit
from normkit.commands import COMMANDS, bench, diagnose, lab

SOURCE = str(Path(normkit.__file__).parents[1])
ACTIONS = [f"lab {action.name}" for action in lab.ACTIONS]
WITHOUT_TORCH = """
import contextlib, io, sys
from normkit.cli import main

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for arguments, expected in ({cases}):
        try:
            status = main(arguments.split())
        except SystemExit as end:  # argparse's way to stop
            status = end.code
        assert status == expected, (arguments, status)
        heavy = {{"torch", "numpy", "rich", "timm"}} & set(sys.modules)
        assert not heavy, (arguments, heavy)
"""


def test_help_and_usage_errors_import_no_torch() -> None:
    commands = ["", *(command.NAME for command in COMMANDS), *ACTIONS]
    cases: list[tuple[str, int]] = [(f"{command} --help", 0) for command in commands]
    cases += [("", 2), ("lab", 2), ("nonsense", 2), ("convert", 2), ("list --kind neither", 2)]
    cases += [("bench --shape 3x3", 2), ("lab run --workers many x.toml", 2)]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(cases=cases)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert ran.returncode == 0, ran.stderr


def test_the_command_itself_imports_no_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "normkit", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    assert ran.returncode == 0
    assert "usage: normkit" in ran.stdout
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "normkit.cli" in imported  # else the list proves nothing
    assert [name for name in imported if name.split(".")[0] == "torch"] == []


def test_choices_are_those_of_the_library() -> None:
    """The commands write them down, so that they need not import what knows them."""
    from normkit import timing
    from normkit.diagnosis.diagnose import BATCHES
    from normkit.diagnosis.findings import SEVERITIES
    from normkit.lab import export, sweep
    from normkit.lab.results import METRICS

    assert tuple(diagnose.SEVERITIES) == tuple(SEVERITIES)
    assert diagnose.BATCHES == BATCHES
    assert tuple(lab.METRICS) == tuple(METRICS)
    assert tuple(lab.ENGINES) == tuple(sweep.ENGINES)
    assert tuple(lab.EXPORT_FORMATS) == tuple(export.FORMATS)
    assert tuple(lab.EXPORT_ROWS) == tuple(export.PER)
    assert tuple(bench.DTYPES) == tuple(timing.DTYPES)
    assert tuple(bench.FORMATS) == tuple(timing.FORMATS)


@pytest.mark.parametrize("command", ACTIONS)
def test_actions_of_the_lab_teach_by_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from normkit.cli import main

    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert f"normkit {command}" in said.partition("examples:")[2]
    assert max(map(len, said.splitlines())) <= 100
