"""python -m normkit.demo: the catalog, then the same small network with two normalizers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk

if TYPE_CHECKING:
    from rich.table import Table

SEED = 0
EPOCHS = 15
BATCH = 64
WIDTHS = (16, 32, 32)
STRIDES = (1, 2, 1)


class Digits(NamedTuple):
    """scikit-learn's 8×8 digits, cut once into what is trained on and what is not."""

    train: tuple[Tensor, Tensor]  # (N, 1, 8, 8), (N,)
    test: tuple[Tensor, Tensor]


class Result(NamedTuple):
    """One row of the table at the end."""

    name: str
    accuracy: float
    seconds: float
    parameters: int


def load_digits() -> Digits:
    """1,437 images to train on and 360 to test on, in a fixed random order."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels, dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    kept, held_out = order[:-360], order[-360:]
    return Digits((x[kept], y[kept]), (x[held_out], y[held_out]))


def network(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Three convolutions, each with a norm and a ReLU, then the mean over positions."""
    torch.manual_seed(SEED)
    inputs = (1, *WIDTHS[:-1])
    convolutions = [
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        for before, after, stride in zip(inputs, WIDTHS, STRIDES, strict=True)
    ]
    head = nn.Linear(WIDTHS[-1], 10)
    # the norms come last: those that draw random numbers must not change the convolutions
    blocks = [nn.Sequential(conv, norm(conv.out_channels), nn.ReLU()) for conv in convolutions]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def train(
    name: str, model: nn.Sequential, digits: Digits, epochs: int, tick: Callable[[], None]
) -> Result:
    """Train with SGD on a falling learning rate; ``tick`` is called after every batch."""
    images, labels = digits.train
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    steps = epochs * batches(digits)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    shuffle = torch.Generator().manual_seed(SEED)  # the same order of data for every model
    start = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=shuffle)
        for chosen in order.split(BATCH)[: batches(digits)]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
            tick()
    seconds = time.perf_counter() - start
    parameters = sum(p.numel() for p in model.parameters())
    return Result(name, accuracy(model, *digits.test), seconds, parameters)


def batches(digits: Digits) -> int:
    """Whole batches in an epoch; the incomplete last one is left out."""
    return len(digits.train[0]) // BATCH


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def catalog_table() -> Table:
    """One row a normalizer, read from the cards."""
    from rich import box
    from rich.table import Table

    title = "The catalog: normkit.make(name, channels)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for column in ("title", "paper", "statistics\nfrom", "exact\nfrom BN"):
        table.add_column(column)
    for name in nk.names():
        card = nk.catalog.ENTRIES[name].card
        exact = "yes" if card.exact_from_bn else "–"
        table.add_row(name, card.title, card.paper, statistics_from(name), exact)
    return table


def statistics_from(name: str) -> str:
    """Whose values share the statistics in training, in words."""
    entry = nk.catalog.ENTRIES[name]
    if entry.card.kind == "weight":
        return "each filter"
    if entry.card.pools_samples:
        return "the batch"
    return "each sample" if entry(8).uses_moments() else "stored"


def result_table(results: list[Result]) -> Table:
    from rich.table import Table

    table = Table(title="The same network on 8×8 digits", title_justify="left")
    table.add_column("normalizer")
    for column in ("test accuracy", "seconds", "parameters"):
        table.add_column(column, justify="right")
    for name, correct, seconds, parameters in results:
        table.add_row(name, f"{correct:.1%}", f"{seconds:.1f}", f"{parameters:,}")
    return table


def main(epochs: int = EPOCHS) -> None:
    try:
        import sklearn  # noqa: F401
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        missing = (error.name or "more").partition(".")[0]
        sys.exit(f"The demo needs {missing}. Try: pip install 'normkit[lab]'")

    torch.set_num_threads(1)  # tensors this small gain nothing from more, and times stay steady
    console = Console()
    console.print(catalog_table())
    digits = load_digits()
    contestants: dict[str, Callable[[int], nn.Module]] = {
        "nn.BatchNorm2d": nn.BatchNorm2d,
        "normkit.UBN": lambda channels: nk.make("ubn", channels),
    }
    results = []
    with Progress(console=console) as progress:
        for name, norm in contestants.items():
            task = progress.add_task(name, total=epochs * batches(digits))
            tick = partial(progress.advance, task)
            results.append(train(name, network(norm), digits, epochs, tick))
    console.print(result_table(results))
    console.print(
        "One seed on a toy set ranks nothing: it shows that both train. "
        "Next: put nk.make('ubn', channels) where your own model has its nn.BatchNorm2d, "
        "or read the tour in README.md."
    )


if __name__ == "__main__":
    main()
