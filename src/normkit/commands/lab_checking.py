"""The checks before training: on a terminal they say what they are at, for a minute or so."""

from __future__ import annotations

from normkit.commands.screen import console
from normkit.lab.experiment import Experiment, checks
from normkit.models import MissingExtra, require


def check(experiment: Experiment) -> None:
    """An error before anything trains, or nothing."""
    try:
        screen, markup = console(stderr=True), require("rich.markup", "cli", "The lab")
    except MissingExtra:
        checks.check(experiment)
        return
    with screen.status("Checking") as line:
        checks.check(experiment, lambda said: line.update(markup.escape(said)))
