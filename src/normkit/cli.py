"""The command normkit: arguments in, exit status out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from normkit.commands import COMMANDS
from normkit.errors import NormkitError

EXAMPLES = """\
examples:
  normkit list                                the layers, one line each
  normkit info bcn                            formula, when to use it, paper, options
  normkit survey timm:resnet50                every normalization in a model
  normkit convert timm:resnet50 --to bcn --weights resnet50.pth --out bcn.safetensors
                                              convert a model, with a certificate
  normkit diagnose mymodels:net --weights net.pt --data valid.pt
                                              what is wrong with its norms, and what to do
  normkit calibrate mymodels:net --weights net.pt --data train.pt --out calibrated.safetensors
                                              statistics of your data into its norms
  normkit bench bn bcn ubn                    time layers on this machine, beside torch's own
  normkit demo                                five normalizers compared in a few minutes
  normkit lab run FILE                        your own comparison, with paired statistics

Each command has more examples: normkit convert --help

exit status: 0 done; 1 a check found failures; 2 bad arguments or input"""


def parser() -> argparse.ArgumentParser:
    """All commands; what each needs is imported when it runs."""
    result = argparse.ArgumentParser(
        prog="normkit",
        description="Normalization layers for PyTorch: look them up, find them in a model, convert "
        "it to them,\ndiagnose and calibrate the norms it has, and compare norms on your data.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action="store_true", help="the versions of normkit and torch")
    result.add_argument(
        "--traceback", action="store_true", help="show where an error comes from, for bug reports"
    )
    commands = result.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.__doc__,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    command_line = parser()
    options = command_line.parse_args(arguments)
    if options.version:
        print(_versions())
        return 0
    if "run" not in options:
        command_line.print_help()
        return 2
    return execute(options.run, options, "normkit", options.traceback)


def execute(
    run: Callable[[argparse.Namespace], int],
    options: argparse.Namespace,
    program: str,
    traceback: bool = False,
) -> int:
    """The exit status of a command; what is wrong with its input is one line on stderr."""
    try:
        return run(options)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (NormkitError, OSError) as error:
        if traceback:
            raise
        print(f"{program}: {str(error).strip()}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def _versions() -> str:
    import torch

    import normkit

    return f"normkit {normkit.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
