"""The commands of the command line, one file each.

A command has a NAME, a line of HELP, EXAMPLES that its --help ends with, a docstring that it
begins with, ``add_arguments`` and ``run``, which gives the exit status.
"""

from normkit.commands import (
    calibrate,
    convert,
    demo,
    diagnose,
    info,
    lab,
    list_,
    survey,
)

COMMANDS = (list_, info, survey, convert, diagnose, calibrate, lab, demo)
"""In the order of ``normkit --help``."""
