"""Clips whose frames are the channels of one image, (frames · C, H, W), frame after frame.

So whatever is done to an image is done to all frames of a clip alike: crops, normalization,
loading. Flips are the task's to refuse where a motion is what is told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.errors import OptionError
from normkit.lab.data.loaders import (
    DecodedFiles,
    Decoder,
    FileLoader,
    Request,
    decoded,
    decoding_processes,
)
from normkit.lab.data.records import Content, Files, Listing, MissingData, Raw, Split, WrongEntry
from normkit.lab.data.sampling import generator
from normkit.lab.data.transforms import Augmentation

FRAMES = 8  # of a clip of moving digits: one for each place of its way
STEPS = (1, 3, 5, 7)  # places between two frames; coprime with 8, so that each is visited once
SIDE, DIGIT = 24, 14  # pixels
GAP = SIDE // FRAMES  # pixels between two places
MADE = (8_000, 2_000)  # clips to train and to test on
SOMETHING_CLASSES = 174  # of Something-Something V1


# ------------------------------------------------------------------ moving digits


def moving_digits(
    read: Callable[[Sequence[Path]], Content], made: tuple[int, int] = MADE
) -> Callable[[Sequence[Path]], Raw]:
    """A reader of clips that are made of MNIST: a digit moves sideways, and how far is the class.

    What leaves on one side comes back on the other. A clip visits all eight places once, from a
    random one on, so that its frames in another order tell nothing about its class. Steps of three
    pixels are seen in the first layers: digits that leap around a ring are not learned by networks
    with GN in 2,500 steps.
    """

    def clips(files: Sequence[Path]) -> Raw:
        content = read(files)
        assert isinstance(content, Raw)
        return Raw(
            *(
                sideways_clips(part.images[:many], name)
                for name, part, many in zip(
                    ("train", "test"), (content.train, content.test), made, strict=True
                )
            )
        )

    return clips


def sideways_clips(digits: Tensor, name: str = "") -> Split:
    """(N, 8, 24, 24) of digits (N, 1, 28, 28): class by class, from a place that is drawn."""
    samples, random = len(digits), generator("clips", name, len(digits))
    small = F.avg_pool2d(digits.float(), 2).round().to(torch.uint8)[:, 0]  # (N, 14, 14)
    labels = torch.arange(samples) % len(STEPS)
    starts, heights = (
        torch.randint(most, (samples, 1), generator=random) for most in (FRAMES, SIDE - DIGIT + 1)
    )
    places = (starts + torch.arange(FRAMES) * torch.tensor(STEPS)[labels, None]) % FRAMES  # (N, 8)
    pixels = torch.arange(SIDE)
    columns = (pixels - GAP * places[:, :, None]) % SIDE  # (N, 8, 24): of the digit
    rows = (pixels - heights) % SIDE  # (N, 24)
    canvas = F.pad(small, (0, SIDE - DIGIT, 0, SIDE - DIGIT))
    which = torch.arange(samples)[:, None, None, None]
    clips = canvas[which, rows[:, None, :, None], columns[:, :, None, :]]
    return Split(clips, labels)


# ------------------------------------------------------------------ folders of frames


@dataclass(frozen=True, eq=False)
class ClipFiles(Files):
    """Folders of frames 00001.jpg, 00002.jpg, …, as ``paths``."""

    frames: list[int] = field(default_factory=list)  # of each

    def frame_files(self, index: int) -> list[str]:
        """Of a clip, all of them."""
        return [f"{self.paths[index]}/{n:05}.jpg" for n in range(1, self.frames[index] + 1)]

    def take(self, indices: Tensor) -> ClipFiles:
        rows = indices.tolist()
        paths, frames = [self.paths[i] for i in rows], [self.frames[i] for i in rows]
        return replace(self, paths=paths, labels=self.labels[indices], frames=frames)


def something_something(files: Sequence[Path]) -> Listing:
    """Something-Something V1 as TSM's code lists it: "FOLDER FRAMES LABEL" in two text files."""
    train, test = (_listed(file, files[2], SOMETHING_CLASSES) for file in files[:2])
    return Listing(train, test, SOMETHING_CLASSES)


def frames_folder(files: Sequence[Path]) -> Listing:
    """Somebody's own, listed the same way; what is trained on says how many classes there are."""
    train = _listed(files[0], files[2])
    counts = torch.bincount(train.labels)
    if lacking := (counts == 0).nonzero().flatten().tolist():
        raise WrongEntry(
            f"{files[0]} has no clip of class {lacking[0]}, and labels up to {len(counts) - 1}: "
            "expected numbers from 0 on without gaps."
        )
    return Listing(train, _listed(files[1], files[2], len(counts)), len(counts))


def _listed(file: Path, folder: Path, classes: int | None = None) -> ClipFiles:
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if len(words) != 3 or not (words[1].isdecimal() and words[2].isdecimal()):
            raise WrongEntry(f"{file}, line {number}: expected FOLDER FRAMES LABEL, got {line!r}.")
        if classes is not None and int(words[2]) >= classes:
            raise WrongEntry(
                f"{file}, line {number}: the label is {words[2]}, expected 0 to {classes - 1}."
            )
        place = folder / words[0]
        if not place.is_dir():  # people list them with the folders that they had
            place = folder / Path(words[0]).name
        if not place.is_dir():
            raise MissingData(f"{place} is not there, and {file}, line {number} lists it.")
        last = place / f"{int(words[1]):05d}.jpg"
        if not last.is_file():
            raise MissingData(
                f"{last} is not there, and {file}, line {number} says that the clip has "
                f"{int(words[1])} frames."
            )
        rows.append((str(place), int(words[1]), int(words[2])))
    if not rows:
        raise MissingData(f"{file} lists no clips: expected FOLDER FRAMES LABEL.")
    paths, frames, labels = zip(*rows, strict=True)
    return ClipFiles(list(paths), torch.tensor(labels), frames=list(frames))


def check_frames(files: ClipFiles, wanted: int) -> None:
    """Refuse a clip that is shorter than the frames asked for."""
    for path, frames in zip(files.paths, files.frames, strict=True):
        if frames < wanted:
            raise OptionError(
                f"{path} has {frames} frames, and {wanted} are asked for. Try fewer frames."
            )


class ClipLoader(FileLoader):
    """Clips from folders: a frame of each of so many equal parts, the middle one in evaluation."""

    def __init__(
        self,
        files: ClipFiles,
        frames: int,
        size: int,
        scale: Tensor,
        shift: Tensor,
        augmentation: Augmentation,
        device: torch.device | str = "cpu",
    ) -> None:
        check_frames(files, frames)
        workers = decoding_processes(len(files.paths))  # clips are not kept
        super().__init__(files, size, scale, shift, augmentation, device, workers)
        self.scale, self.shift = (each.repeat(1, frames, 1, 1) for each in (self.scale, self.shift))
        self.data = DecodedClips(files, self.data.decoder, frames)


class DecodedClips(DecodedFiles):
    """The clips, as a worker process sees them; one seed brings all frames to their size alike."""

    def __init__(self, files: ClipFiles, decoder: Decoder, frames: int) -> None:
        super().__init__(files, decoder)
        self.counts, self.frames = files.frames, frames

    def __getitem__(self, request: Request) -> tuple[Tensor, int]:
        index, seed = request
        paths = chosen_frames(self.paths[index], self.counts[index], self.frames, seed)
        images = [self.decoder(decoded(path, self.open), seed) for path in paths]
        return torch.cat(images), self.labels[index]


def chosen_frames(folder: str, frames: int, wanted: int, seed: int | None) -> list[str]:
    """The files of ``wanted`` frames, one of each equal part; without a seed the middle ones.

    >>> [name[-6:-4] for name in chosen_frames("clip", 40, 4, None)]
    ['06', '16', '26', '36']
    """
    at = [0.5] * wanted
    if seed is not None:
        at = torch.rand(wanted, generator=generator("frames", seed)).tolist()
    numbers = [int((part + share) * frames / wanted) + 1 for part, share in enumerate(at)]
    return [f"{folder}/{number:05}.jpg" for number in numbers]
