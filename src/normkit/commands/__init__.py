"""The commands of the command line, one file each.

A command has a NAME, a line of HELP, EXAMPLES that its --help ends with, a docstring that it
begins with, ``add_arguments`` and ``run``, which gives the exit status. What a command works with
is imported when it runs: help pages and usage errors do not wait for torch.
"""

from normkit.commands import (
    bench,
    calibrate,
    completion,
    convert,
    demo,
    diagnose,
    info,
    lab,
    list_,
    survey,
)

COMMANDS = (list_, info, survey, convert, diagnose, calibrate, bench, lab, demo, completion)
"""In the order of ``normkit --help``."""
