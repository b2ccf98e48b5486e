"""Recognition of clips by a network for images with temporal shifts.

Lin, Gan & Han 2019 (TSM), the residual form: the shift stands at the begin of each block's branch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.errors import OptionError
from normkit.lab import data
from normkit.lab.data import Sets
from normkit.lab.data.clips import FRAMES, ClipFiles, ClipLoader, check_frames
from normkit.lab.data.loading import SIDE, content_of
from normkit.lab.data.records import Listing
from normkit.lab.data.sampling import split
from normkit.lab.data.transforms import IMAGENET, Augmentation, coefficients
from normkit.lab.experiment.records import Setting
from normkit.lab.models.build import build
from normkit.lab.tasks.classification import Classification, ClassificationScore, correct
from normkit.lab.tasks.drawing import beside, pixels
from normkit.lab.tasks.sets import is_own

PICTURES = 3
SHARE = 8  # of the channels one in so many is taken from the next frame, and one from the last


class Video(Classification):
    """One of several classes for each clip of ``frames`` frames, which are an image's channels."""

    takes_metrics: ClassVar[bool] = False

    def __init__(self, frames: int = FRAMES) -> None:
        if not isinstance(frames, int) or frames < 2:
            raise OptionError(f"frames is {frames!r}, expected 2 or more.")
        self.frames = frames

    # ---------------------------------------------------------------- data and model

    def check(self, setting: Setting) -> None:
        spec = setting.data
        if is_own(spec.name):
            return
        data.check_kind(spec, "clips")
        if spec.name == "moving-digits" and self.frames != FRAMES:
            raise OptionError(
                f"clips of {spec.name} have {FRAMES} frames, and {self.frames} are asked for."
            )
        if spec.flip or spec.rotation or spec.mixup:
            raise OptionError(
                "data.flip, data.rotation and data.mixup change what a motion is. Leave them out."
            )

    def load(self, setting: Setting, device: torch.device | str) -> Sets:
        spec = setting.data
        if is_own(spec.name):
            return super().load(setting, device)
        if spec.name == "moving-digits":
            return data.load(spec, device, kind="clips")
        listing = content_of(spec)
        assert isinstance(listing, Listing)
        scale, shift = coefficients(spec.normalize, IMAGENET, 255)
        side, augmentation = spec.size or SIDE, Augmentation.of(spec)

        def loader(files: Any) -> ClipLoader:
            return ClipLoader(files, self.frames, side, scale, shift, augmentation, device)

        labels = listing.train.labels
        train, aside = split(labels, spec)
        return Sets(
            name=spec.name,
            train=loader(listing.train.take(train)),
            validation=None if aside is None else loader(listing.train.take(aside)),
            test=loader(listing.test),
            classes=listing.classes,
            shape=(3 * self.frames, side, side),
        )

    def locate(self, setting: Setting) -> None:
        super().locate(setting)
        if not is_own(setting.data.name) and setting.data.name != "moving-digits":
            listing = content_of(setting.data)
            for part in (listing.train, listing.test):
                assert isinstance(part, ClipFiles)
                check_frames(part, self.frames)

    def classes_and_shape(self, setting: Setting) -> tuple[int, tuple[int, ...]]:
        classes, shape = super().classes_and_shape(setting)
        if is_own(setting.data.name) or setting.data.name == "moving-digits":
            return classes, shape
        return classes, (self.frames * shape[0], *shape[1:])

    def network(self, setting: Setting, classes: int, shape: tuple[int, ...]) -> nn.Module:
        if shape[0] % self.frames:
            raise OptionError(
                f"clips have {shape[0]} channels, which are not {self.frames} frames. "
                "Try another number of frames."
            )
        frame = (shape[0] // self.frames, *shape[1:])
        network = build(setting.model, classes, frame, folder=setting.code.folder)
        return ClipNetwork(network, self.frames)

    # ---------------------------------------------------------------- judging

    def evaluation(self, part: str) -> ClipScore:
        score = ClipScore(self.format.device, self.sets.classes, self.format.precision, part)
        score.task, score.criterion = self, self.criterion
        return score

    def shuffled(self, clips: Tensor) -> Tensor:
        """The same frames, of each clip in a random order of its own.

        One order for all would turn the leaps of a class into other leaps, which still tell it.
        """
        frames = clips.unflatten(1, (self.frames, -1))
        order = torch.rand(len(clips), self.frames, device=clips.device).argsort(1)
        rows = torch.arange(len(clips), device=clips.device)[:, None]
        return frames[rows, order].flatten(1, 2)

    def pictures(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """The frames of test clips, with the answers."""
        clips, labels = next(iter(self.evaluation_batches("test")))
        answers = model(clips[:PICTURES]).argmax(1).tolist()
        for clip, label, answer in zip(
            pixels(clips[:PICTURES], self.sets.test), labels.tolist(), answers, strict=False
        ):
            frames = clip.unflatten(0, (self.frames, -1))
            yield f"a test clip of class {label}, answer {answer}", beside(*frames)


class ClipScore(ClassificationScore):
    """Right answers, and how many are left when the frames come in another order."""

    task: Video
    right: Tensor | None = None

    def add(self, model: nn.Module, batch: Any) -> None:
        super().add(model, batch)
        clips, labels = batch
        with self.task.format.autocast():
            right = correct(model(self.task.shuffled(clips)), labels)
        self.right = right if self.right is None else self.right + right

    def values(self) -> dict[str, float | list[float]]:
        share = 0.0 if self.right is None else float(self.right) / self.samples
        return {**super().values(), "shuffled_accuracy": share}


# ------------------------------------------------------------------ the network


class FrameShift(nn.Module):
    """Of maps (N · frames, C, H, W): some channels from the frame before, some from the next.

    >>> x = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 8, 1, 1)
    >>> FrameShift(3)(x)[:, :3, 0, 0]
    tensor([[1., 0., 0.],
            [2., 0., 1.],
            [0., 1., 2.]])
    """

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.frames = frames

    def forward(self, x: Tensor) -> Tensor:
        clips = x.unflatten(0, (-1, self.frames))
        moved = max(1, clips.shape[2] // SHARE)
        later, earlier, still = clips.split([moved, moved, clips.shape[2] - 2 * moved], dim=2)
        nothing = torch.zeros_like(later[:, :1])
        later = torch.cat([later[:, 1:], nothing], dim=1)
        earlier = torch.cat([nothing, earlier[:, :-1]], dim=1)
        return torch.cat([later, earlier, still], dim=2).flatten(0, 1)


class ClipNetwork(nn.Module):
    """A residual network for images that takes clips (N, frames · C, H, W): the mean of its frames.

    Its norms see every frame as a sample.
    """

    def __init__(self, network: nn.Module, frames: int) -> None:
        super().__init__()
        blocks = [
            module
            for module in network.modules()
            if isinstance(getattr(module, "conv1", None), nn.Conv2d)
            and isinstance(getattr(module, "conv2", None), nn.Conv2d)
        ]
        if not blocks:
            raise OptionError(
                f"{type(network).__name__} has no blocks with conv1 and conv2, where frames could "
                "be shifted. Try torchvision:resnet18."
            )
        for block in blocks:
            block.conv1 = nn.Sequential(FrameShift(frames), block.conv1)  # type: ignore[arg-type]
        self.network, self.frames = network, frames

    def forward(self, x: Tensor) -> Tensor:
        images = x.unflatten(1, (self.frames, -1)).flatten(0, 1)
        logits: Tensor = self.network(images)
        return logits.unflatten(0, (-1, self.frames)).mean(1)
