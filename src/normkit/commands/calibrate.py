"""Give the norms of a model the statistics that their inputs have on your data, and save it."""

from __future__ import annotations

import argparse
from pathlib import Path

from normkit.commands import data_arguments, model_arguments
from normkit.commands.output import add_json, check_outputs, screen_of, write_json
from normkit.core.atomic_write import atomic_write_all
from normkit.errors import OptionError

NAME = "calibrate"
HELP = "give the norms of a model the statistics of your data"
EXAMPLES = f"""\
examples:
  normkit calibrate timm:resnet50 --weights swa.pth --data images.pt --out calibrated.safetensors
  normkit calibrate timm:resnet50 --weights resnet50.pth --data photos/ --until 0.01 --out new.pth
      stop when the standard error of every mean and variance is below 1 %
  normkit calibrate mypackage.nets:small_net --data x.npz --statistics night.safetensors
      keep the statistics apart; normkit.Statistics.load reads them, merges and applies them

{data_arguments.DATA}
  Classes are not needed.

{model_arguments.REFERENCES}

exit status: 0 done, also where batches were left out, which standard error says; 2 bad arguments
  or input"""
DROPPED = (
    "The result would be dropped: --out FILE keeps the weights, --statistics FILE the statistics. "
    "Try --dry-run to see the table alone."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model(parser)
    add = parser.add_argument
    add("--data", required=True, metavar="DATA", help="inputs; see below")
    data_arguments.add_reading(parser)
    add("--images", type=int, metavar="N", help="stop after so many images")
    add("--until", type=float, metavar="SHARE", help="stop at this standard error, such as 0.01")
    add("--mode", choices=("progressive", "layerwise"), default="progressive")
    add("--out", type=Path, metavar="FILE", help="weights to write: .safetensors, .pt or .pth")
    add("--statistics", type=Path, metavar="FILE", help="statistics to write: .safetensors")
    add("--dry-run", action="store_true", help="print the table, and drop the result")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from normkit import checkpoints
    from normkit.calibration import calibrate

    asked = [] if options.dry_run else [options.out, options.statistics]
    keeping = [path for path in asked if path is not None]
    if not keeping and not options.dry_run:
        raise OptionError(DROPPED)
    check_outputs([*keeping, *filter(None, [options.json])], options.force)
    batches = data_arguments.batches_of(options.data, options)  # before a large model is built
    model = model_arguments.model_of(options)
    save = checkpoints.writer(model, options.out) if options.out in keeping else None
    with data_arguments.reading(data=options.data):
        result = calibrate(
            model, batches, mode=options.mode, images=options.images, until=options.until
        )
    screen = screen_of(options)
    screen.print(str(result), markup=False, soft_wrap=True)
    if options.statistics in keeping:
        result.statistics.save(options.statistics)
    if save is not None:
        atomic_write_all({options.out: save})
    written = " and ".join(map(str, keeping))
    summary = f"Written: {written}." if keeping else "Nothing was written, as --dry-run asks."
    screen.print(f"\n{summary}", markup=False, soft_wrap=True)
    write_json(options, result.to_dict())
    return 0
