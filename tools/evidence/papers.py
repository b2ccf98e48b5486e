"""Every table and figure of the five papers, with its experiment or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

DRAWING = "a drawing: nothing to measure"


@dataclass(frozen=True)
class PaperItem:
    """A table or figure, or several in a row that show the same thing."""

    paper: str  # how the files of its experiments begin
    kind: str  # table or figure
    first: int
    shows: str
    experiment: str = ""  # the stem of a file in experiments/
    reason: str = ""  # why it has none
    last: int = 0  # of several; 0: the first

    @property
    def numbers(self) -> range:
        return range(self.first, max(self.first, self.last) + 1)

    @property
    def label(self) -> str:
        if len(self.numbers) == 1:
            return f"{self.kind} {self.first}"
        return f"{self.kind}s {self.first}–{self.last}"


@dataclass(frozen=True)
class Paper:
    """One of the five, and how many tables and figures its text has."""

    key: str
    title: str
    tables: int
    figures: int


PAPERS = (
    Paper("ubn", "Unified Batch Normalization (Wang et al. 2024)", 8, 40),
    Paper("revisiting-bn", "Revisiting Batch Normalization (Davis & Frank 2021)", 6, 1),
    Paper(
        "estimation-shift",
        "Delving into the Estimation Shift of Batch Normalization in a Network (Huang et al. 2022)",
        6,
        8,
    ),
    Paper(
        "ws-bcn",
        "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization "
        "(Qiao et al. 2019)",
        12,
        8,
    ),
    Paper("bgn", "Batch Group Normalization (Zhou et al. 2020)", 7, 3),
)


def _table(paper: str, number: int, shows: str, reason: str = "") -> PaperItem:
    """A table, whose experiment has its name unless there is a reason why it has none."""
    experiment = "" if reason else f"{paper}-table-{number}"
    return PaperItem(paper, "table", number, shows, experiment, reason)


def _figure(
    paper: str, number: int, shows: str, reason: str = "", *, experiment: str = "", last: int = 0
) -> PaperItem:
    own = f"{paper}-figures-{number}-{last}" if last else f"{paper}-figure-{number}"
    chosen = "" if reason else experiment or own
    return PaperItem(paper, "figure", number, shows, chosen, reason, last)


ITEMS = (
    _table("ubn", 1, "which parts of BN other methods change", "a list of methods, no numbers"),
    _table("ubn", 2, "ImageNet, four networks"),
    _table("ubn", 3, "CIFAR-100, six networks, seven norms"),
    _table("ubn", 4, "CIFAR-10, five networks"),
    _table("ubn", 5, "object detection on COCO"),
    _table("ubn", 6, "instance segmentation on COCO"),
    _table("ubn", 7, "batches of 32 to 512"),
    _table("ubn", 8, "epochs and seconds until UBN is as good as BN"),
    _figure("ubn", 1, "condensation and learning curves, CIFAR-10"),
    _figure("ubn", 2, "condensation with BN and UBN, CIFAR-100"),
    _figure("ubn", 3, "the parts of BN and UBN", DRAWING),
    _figure("ubn", 4, "condensation and learning curves, CIFAR-100"),
    _figure("ubn", 5, "each rectification alone"),
    _figure("ubn", 6, "the threshold"),
    _figure("ubn", 7, "condensation on ImageNet, four networks", last=10),
    _figure("ubn", 11, "the threshold, three networks, two data sets", last=16),
    _figure("ubn", 17, "batches of 32 to 512, two networks, two data sets", last=36),
    _figure("ubn", 37, "learning curves of each rectification", last=40),
    _table("revisiting-bn", 1, "start scales and learning rates, CIFAR-10"),
    _table("revisiting-bn", 2, "other forms of the scale"),
    _table("revisiting-bn", 3, "CIFAR-100, CUB-200, Stanford Cars"),
    _table("revisiting-bn", 4, "depths and architectures"),
    _table("revisiting-bn", 5, "input normalization"),
    _table("revisiting-bn", 6, "RBN and IEBN"),
    _figure("revisiting-bn", 1, "the flow through one channel of BN", DRAWING),
    _table("estimation-shift", 1, "position of the batch-free norm in a block"),
    _table("estimation-shift", 2, "four networks on ImageNet"),
    _table("estimation-shift", 3, "advanced training strategies"),
    _table("estimation-shift", 4, "Mask R-CNN on COCO"),
    _table("estimation-shift", 5, "Faster R-CNN on COCO"),
    _table("estimation-shift", 6, "detection from scratch"),
    _figure("estimation-shift", 1, "how the shift comes about", DRAWING),
    _figure("estimation-shift", 2, "ESM by layer, trained and tested on the same data"),
    _figure("estimation-shift", 3, "ESM by layer and size of the training set"),
    _figure("estimation-shift", 4, "as figure 2, with GN in odd layers"),
    _figure("estimation-shift", 5, "as figure 3, with GN in odd layers"),
    _figure("estimation-shift", 6, "a bottleneck and an XBNBlock", DRAWING),
    _figure("estimation-shift", 7, "how many blocks have a batch-free norm"),
    _figure("estimation-shift", 8, "errors in the running statistics"),
    _table("ws-bcn", 1, "norms for one image a GPU, ImageNet"),
    _table("ws-bcn", 2, "ResNet-50 and ResNet-101, ImageNet"),
    _table("ws-bcn", 3, "WS, WN and CWN"),
    _table("ws-bcn", 4, "the two halves of WS"),
    _table("ws-bcn", 5, "ResNeXt"),
    _table("ws-bcn", 6, "BCN with large batches"),
    _table("ws-bcn", 7, "ResNet-110 on CIFAR, large and micro-batches"),
    _table("ws-bcn", 8, "ResNet-18 on CIFAR-10, beside SN and DN"),
    _table("ws-bcn", 9, "Mask R-CNN on COCO"),
    _table("ws-bcn", 10, "Faster R-CNN on COCO"),
    _table("ws-bcn", 11, "DeepLabV3 on PASCAL VOC"),
    _table("ws-bcn", 12, "TSM on Something-Something"),
    _figure("ws-bcn", 1, "ImageNet (of table 6) and COCO", experiment="ws-bcn-table-6"),
    _figure("ws-bcn", 2, "what is normalized", DRAWING),
    _figure("ws-bcn", 3, "computation graph of WS", DRAWING),
    _figure("ws-bcn", 4, "what WS does to gradients"),
    _figure("ws-bcn", 5, "distance to singularities"),
    _figure("ws-bcn", 6, "StatDiff, with and without WS"),
    _figure("ws-bcn", 7, "two channels of a group", DRAWING),
    _figure("ws-bcn", 8, "learning curves of GN, GN + WS, BCN + WS"),
    _table("bgn", 1, "number of groups by batch size, ImageNet"),
    _table("bgn", 2, "seven norms by batch size, ImageNet"),
    _table("bgn", 3, "DARTS on CIFAR-10: search and training"),
    _table("bgn", 4, "a searched network (MANAS) on CIFAR-10"),
    _table("bgn", 5, "adversarial training"),
    _table("bgn", 6, "mini-ImageNet"),
    _table("bgn", 7, "Office-31"),
    _figure("bgn", 1, "cells of statistics; curves of table 2", experiment="bgn-table-2"),
    _figure("bgn", 2, "cells of searched networks", DRAWING),
    _figure("bgn", 3, "few-shot learning", DRAWING),
)


def counts() -> tuple[int, int, int]:
    """Tables and figures: all, those with an experiment, and drawings."""
    numbers = [(len(item.numbers), item) for item in ITEMS]
    return (
        sum(many for many, _ in numbers),
        sum(many for many, item in numbers if item.experiment),
        sum(many for many, item in numbers if item.reason == DRAWING),
    )


def papers_page() -> str:
    """docs/papers.md"""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    total, measured, drawings = counts()
    yield "# The tables and figures of the five papers"
    yield ""
    rest = total - measured - drawings
    yield f"All {total} of them: {measured} have an experiment, {drawings} are drawings, and"
    yield f"{rest} has no numbers."
    yield '`normkit lab run NAME` trains one; at the scale "paper" it follows what was published,'
    yield "and `difference` in its file says where it cannot. This page is written by"
    yield "`make evidence` from `tools/evidence/papers.py`."
    for paper in PAPERS:
        yield ""
        yield f"## {paper.title}"
        yield ""
        yield "| | what it shows | experiment, or why there is none |"
        yield "|---|---|---|"
        for item in ITEMS:
            if item.paper == paper.key:
                link = f"[{item.experiment}](../experiments/{item.experiment}.toml)"
                where = link if item.experiment else item.reason
                yield f"| {item.label} | {item.shows} | {where} |"
