"""Find out what is wrong with the norms of a model, why it matters, and what to do about it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from normkit.commands import data_arguments, model_arguments
from normkit.commands.output import (
    STANDARD_OUTPUT,
    add_json,
    check_outputs,
    screen_of,
    write_texts,
)
from normkit.errors import OptionError

NAME = "diagnose"
HELP = "what is wrong with the norms of a model, and what to do"
EXAMPLES = f"""\
examples:
  normkit diagnose timm:resnet50 --weights resnet50.pth --data photos/ --html report.html
  normkit diagnose mypackage.nets:small_net --weights net.pt --data test.pt
  normkit diagnose mypackage.nets:small_net --data mypackage.data:test_loader \\
      --train-data mypackage.data:train_loader --steps 90000 --fail-on serious
      in continuous integration: exit status 1 if there is a finding of that kind or worse
  normkit diagnose mypackage.nets:small_net --weights rank0.pt --data test.pt \\
      --ranks rank0.pt rank1.pt
  normkit diagnose mypackage.nets:small_net --weights ema.pt --ema-of live.pt --data test.pt

{data_arguments.DATA}
  Without classes the gap between train and eval mode is not measured.

{model_arguments.REFERENCES}

exit status: 0 done; 1 findings, with --fail-on; 2 bad arguments or input"""

SEVERITIES = ("serious", "warning", "note")
BATCHES = 16
OPTIONS = {
    "train_loader": "--train-data",
    "steps": "--steps",
    "ranks": "--ranks",
    "ema_of": "--ema-of",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model(parser)
    add = parser.add_argument
    add("--data", required=True, metavar="DATA", help="to evaluate on; see below")
    add(
        "--train-data",
        metavar="DATA",
        help="that the model was trained on; tells more causes apart",
    )
    add("--steps", type=int, metavar="N", help="training batches the model has seen")
    add("--ranks", type=Path, nargs="+", default=[], metavar="FILE", help="weights, one a process")
    add(
        "--ema-of", type=Path, metavar="FILE", help="live weights, if the model's are their average"
    )
    add(
        "--attribution",
        choices=("output_error", "esm", "swap", "none"),
        default="output_error",
        help="where a gap comes from: by what running statistics do to outputs, by estimation "
        "shift, or exact, a pass for each norm",
    )
    add("--max-batches", type=int, default=BATCHES, metavar="N", help=f"to look at ({BATCHES})")
    data_arguments.add_reading(parser)
    add("--html", type=Path, metavar="FILE", help="write a page with charts; - is standard output")
    add_json(parser)
    add("--fail-on", choices=SEVERITIES, help="exit with 1 on such a finding or a worse one")


def _as_options(text: str) -> str:
    """Arguments of ``diagnose`` that a text asks for, as options of this command."""
    for argument, option in OPTIONS.items():
        text = re.sub(rf"\b(Give\s+){argument}=", rf"\1{option}", text)
    return text


def run(options: argparse.Namespace) -> int:
    import torch

    from normkit import checkpoints
    from normkit.diagnosis.diagnose import diagnose

    asked = [(options.html, "to_html"), (options.json, "to_json")]
    asked = [(path, how) for path, how in asked if path is not None]
    check_outputs((path for path, _ in asked), options.force)
    if options.max_batches < 1:
        raise OptionError(f"--max-batches got {options.max_batches}. Expected at least 1.")
    data = data_arguments.batches_of(options.data, options)
    training = (
        None
        if options.train_data is None
        else data_arguments.batches_of(options.train_data, options, training=True)
    )
    ranks = [checkpoints.read(path) for path in options.ranks]
    live = None if options.ema_of is None else checkpoints.read(options.ema_of)
    model = model_arguments.model_of(options).eval()
    sources = data_arguments.reading(data=options.data, train_data=options.train_data)
    with sources, torch.random.fork_rng([]):
        diagnosis = diagnose(
            model,
            data,
            train_loader=training,
            steps=options.steps,
            ranks=ranks,
            ema_of=live,
            attribution=None if options.attribution == "none" else options.attribution,
            max_batches=options.max_batches,
        )
    screen = screen_of(options)
    screen.print(_as_options(str(diagnosis)), markup=False, soft_wrap=True)
    write_texts({path: getattr(diagnosis, how)() for path, how in asked})
    files = [str(path) for path, _ in asked if path != STANDARD_OUTPUT]
    if files:
        screen.print(f"\nWritten: {' and '.join(files)}", markup=False, soft_wrap=True)
    if options.fail_on is None:
        return 0
    bad = diagnosis.at_least(options.fail_on)
    if bad:
        many = "finding is" if len(bad) == 1 else "findings are"
        screen.print(f"\n{len(bad)} {many} {options.fail_on} or worse.", markup=False)
    return 1 if bad else 0
