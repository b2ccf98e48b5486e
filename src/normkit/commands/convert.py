"""Turn the norms of a model into another kind, measure what that does, and save the result."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.commands import data_arguments, model_arguments
from normkit.commands.output import (
    add_json,
    check_outputs,
    json_text,
    screen_of,
    text_writer,
    write_json,
)
from normkit.core.atomic_write import atomic_write_all
from normkit.errors import NothingToDo, OptionError

if TYPE_CHECKING:
    from normkit.conversion.plan import Plan

NAME = "convert"
HELP = "convert the norms of a model, with a certificate"
EXAMPLES = f"""\
examples:
  normkit convert timm:resnet50 --to ubn --weights resnet50.pth --out resnet50-ubn.safetensors
  normkit convert timm:resnet50 --to gn --option groups=16 --where 'layer4.*' --dry-run
      print what would happen, layer by layer; nothing is written
  normkit convert torchvision:resnet18 --to bcn --build num_classes=10 --out small.pt
  normkit convert mypackage.nets:small_net --to bgn --example 8x1x28x28 --out net.safetensors
  normkit convert timm:resnet50 --to gn --option groups=1 --weights resnet50.pth --fit photos/
      --out resnet50-gn.safetensors
      scales and shifts fitted on 64 to 256 images without labels, so that it stays accurate

The certificate, which says how far the output has changed in eval mode, is printed and written
beside the weights: model.safetensors, model.certificate.json. Without --weights the model has the
random weights that it was built with.

{model_arguments.REFERENCES}

{model_arguments.WHERE}

{data_arguments.DATA}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments.add_model(parser)
    add = parser.add_argument
    add("--to", required=True, metavar="LAYER", help="what the norms become; see normkit list")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="option of that layer")
    model_arguments.add_where(parser)
    add("--fit", metavar="DATA", help="images without labels to fit the new norms on")
    add("--fit-images", type=int, default=256, metavar="N", help="how many of them (256)")
    add("--fit-all", action="store_true", help="fit weights of other layers, too")
    add("--fit-standardize", metavar="METHOD", help="with weights standardized by ws, cwn or wn")
    add("--distill", type=int, default=0, metavar="STEPS", help="then train on them to match (0)")
    add("--distill-state", metavar="FILE", help="go on from this file after an interruption")
    data_arguments.add_reading(parser)
    add("--out", type=Path, metavar="FILE", help="weights to write: .safetensors, .pt or .pth")
    add("--dry-run", action="store_true", help="print the plan, and stop")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from normkit import checkpoints
    from normkit.conversion import Fit, plan_conversion
    from normkit.conversion.targets import find_target

    layer = model_arguments.pairs("--option", options.option)
    for name in ("distill", "fit_all", "fit_standardize", "distill_state"):
        if getattr(options, name) and options.fit is None:
            option = "--" + name.replace("_", "-")
            raise OptionError(f"{option} goes on from a fit: give images with --fit.")
    find_target(options.to).check(layer)  # first what costs nothing: a large model is still unbuilt
    example, where = model_arguments.example_of(options), model_arguments.where_of(options)
    files = _files(options)
    model = model_arguments.model_of(options)
    fit = None
    if options.fit is not None:
        images = data_arguments.batches_of(options.fit, options, unlabelled=True)
        fit = Fit(
            images,
            max_images=options.fit_images,
            distill=options.distill,
            parameters="all" if options.fit_all else None,
            standardize=options.fit_standardize,
            checkpoint=options.distill_state,
        )
    plan = plan_conversion(model, options.to, where, example=example, fit=fit, **layer)
    screen = screen_of(options)
    screen.print(str(plan), markup=False, soft_wrap=True)
    if options.dry_run:
        write_json(options, _record(options, plan, layer))
        return 0
    if not plan.count():
        raise NothingToDo(f"No norm of {options.model} is converted, so nothing was written.")
    screen.print(f"\n{plan.apply()}", markup=False, soft_wrap=True)
    weights, certificate = files
    record = _record(options, plan, layer)
    text = json_text(record)
    atomic_write_all({weights: checkpoints.writer(model, weights), certificate: text_writer(text)})
    screen.print(f"\nWritten: {weights} and {certificate}. To load the weights:\n", markup=False)
    screen.print(code(options, layer, where, plan), markup=False, soft_wrap=True)
    write_json(options, record)
    return 0


def _files(options: argparse.Namespace) -> tuple[Path, Path]:
    """Where weights and certificate go; an error if that is not possible."""
    asked = [] if options.json is None else [options.json]
    if options.dry_run:
        check_outputs(asked, options.force)
        return Path(), Path()
    if options.out is None:
        raise OptionError("--out is missing. Try --out model.safetensors, or --dry-run.")
    from torch import nn

    from normkit import checkpoints

    checkpoints.writer(nn.Identity(), options.out)  # the ending says how to write
    files = options.out, options.out.with_suffix(".certificate.json")
    check_outputs([*files, *asked], options.force)
    return files


def _record(options: argparse.Namespace, plan: Plan, layer: dict[str, Any]) -> dict[str, Any]:
    """The certificate and all that is needed to get it again."""
    import torch

    import normkit

    return {
        "model": options.model,
        "build": model_arguments.pairs("--build", options.build),
        "weights": None if options.weights is None else str(options.weights),
        "to": options.to,
        "options": layer,
        "where": options.where,
        "fit": options.fit,
        "fit_all": options.fit_all,
        "fit_standardize": options.fit_standardize,
        "distill": options.distill,
        "normkit": normkit.__version__,
        "torch": torch.__version__,
        "certificate": None if plan.certificate is None else plan.certificate.to_dict(),
        "steps": [vars(step) for step in plan.steps],
    }


def code(options: argparse.Namespace, layer: dict[str, Any], where: Any, plan: Plan) -> str:
    """A program that loads what was written; where groups were chosen by a fit, it names them."""
    from normkit import checkpoints, models
    from normkit.conversion.edits import replacements
    from normkit.conversion.standardize import Standardize

    library, build = models.code_for(options.model, model_arguments.pairs("--build", options.build))
    calls = [_call(options.to, where, layer)]
    if plan.fit is not None and not isinstance(layer.get("groups", 1), int):
        chosen: dict[int, list[str]] = {}
        for edit in replacements(plan.edits):
            chosen.setdefault(int(edit.new.groups), []).append(edit.paths[0])  # type: ignore[arg-type]
        calls = [_call(options.to, p, {**layer, "groups": g}) for g, p in sorted(chosen.items())]
    if plan.fit is not None and options.fit_standardize:
        paths = [edit.path for edit in plan.edits if isinstance(edit, Standardize)]
        calls.append(f"normkit.standardize(model, {options.fit_standardize!r}, paths={paths!r})")
    path = str(options.out)
    safe = options.out.suffix == checkpoints.SAFETENSORS
    lines = [
        library,
        "import normkit",
        "from safetensors.torch import load_file" if safe else "import torch",
        "",
        f"model = {build}",
        *calls,
        f"model.load_state_dict({f'load_file({path!r})' if safe else f'torch.load({path!r})'})",
    ]
    return "\n".join(f"    {line}" if line else "" for line in lines)


def _call(to: str, where: Any, layer: dict[str, Any]) -> str:
    arguments = "" if where is None else f", where={where!r}"
    arguments += "".join(f", {name}={value!r}" for name, value in layer.items())
    return f"normkit.convert(model, {to!r}, example=False{arguments})"
