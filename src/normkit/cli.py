"""The command normkit: arguments in, exit status out."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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

exit status: 0 done; 1 a check found failures; 2 bad arguments or input, or an error;
  130 interrupted

completion in a shell: normkit completion --help"""


def parser() -> argparse.ArgumentParser:
    """All commands; what each needs is imported when it runs."""
    from normkit.commands import COMMANDS

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
        added.set_defaults(run=command.run, command_line=result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments

    def run(_: argparse.Namespace) -> int:
        command_line = parser()
        try:
            options = command_line.parse_args(words)
        except SystemExit:  # after a help page, or a usage error
            sys.stdout.flush()
            raise
        if options.version:
            print(_versions())
            return 0
        if "run" not in options:
            command_line.print_help()
            return 2
        status: int = options.run(options)
        return status

    return execute(run, argparse.Namespace(), "normkit", "--traceback" in words)


def execute(
    run: Callable[[argparse.Namespace], int],
    options: argparse.Namespace,
    program: str,
    traceback: bool = False,
) -> int:
    """The exit status of a command; whatever goes wrong is one line on stderr."""
    shown = warnings.showwarning

    def say(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if category.__module__.startswith(
            "normkit."
        ):  # written for people: without a line of source
            print(f"{program}: {message}", file=sys.stderr)
        else:
            shown(message, category, *place)

    warnings.showwarning = say  # type: ignore[assignment]
    try:
        status = run(options)
        sys.stdout.flush()  # while a full disk can still be told
        return status
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _drop_output()
        return 0
    except KeyboardInterrupt:  # also while torch is being imported
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if traceback:
            raise
        print(f"{program}: {_in_a_line(error, program)}", file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()  # what could not be written would be tried again at exit
        return 2
    finally:
        warnings.showwarning = shown


def _drop_output() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_a_line(error: Exception, program: str) -> str:
    """The message; where it was not written for people, with its class and what to do."""
    from normkit.errors import NormkitError

    text = " ".join(str(error).split())
    if isinstance(error, NormkitError):
        return str(error).strip()
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EFBIG) and error.filename is None
        return f"standard output could not be written: {text}" if full else text
    hint = " (normkit --traceback … shows where)" if program == "normkit" else ""
    return f"{type(error).__name__}: {text or 'no message'}{hint}"


def _versions() -> str:
    import torch

    import normkit

    return f"normkit {normkit.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
