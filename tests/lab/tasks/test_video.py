"""Clips of moving digits, and of frames in folders, by a network with temporal shifts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from normkit.errors import NormkitError, OptionError
from normkit.lab.data import clips, sources
from normkit.lab.data.clips import STEPS, sideways_clips
from normkit.lab.data.records import Raw, Split
from normkit.lab.experiment import Data, Run, Setting
from normkit.lab.experiment.records import Model, ModelStep, TaskSpec, Train
from normkit.lab.tasks import load_sets, make_task
from normkit.lab.tasks.video import ClipNetwork, FrameShift, Video
from normkit.lab.train import Training

DIGITS = torch.randint(1, 255, (24, 1, 28, 28), dtype=torch.uint8)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """24 clips to train on and 8 to test on; no file is read."""
    part = Split(DIGITS, torch.zeros(24, dtype=torch.long))
    read = clips.moving_digits(lambda files: Raw(part, part), (24, 8))
    source = sources.MOVING_DIGITS
    folder = Path(__file__).parent
    layout = dataclasses.replace(
        source.layouts[0], files=(sources.File((Path(__file__).name,)),), read=read, folders=("",)
    )
    small = dataclasses.replace(source, layouts=(layout,), samples=(24, 8), folders=())
    monkeypatch.setitem(sources.PUBLISHED, "moving-digits", small)
    return Setting(
        Data("moving-digits", path=str(folder), size=16),
        Model("native:resnet", options={"depth": 8, "width": 8}),
        (ModelStep("norm", "bn"),),
        Train(epochs=1, batch=12, lr=0.05),
        task=TaskSpec("video"),
    )


def test_one_epoch_is_trained_and_judged(digits: Setting) -> None:
    training = Training(Run(digits, 1), load_sets(digits))
    while training.step():
        pass
    result = training.result()
    last = result.epochs[-1]
    assert 0 <= last.test("accuracy") <= 1
    assert 0 <= last.test("shuffled_accuracy") <= 1
    assert len(result.pictures) == 3


def test_frames_in_another_order_tell_nothing_about_the_class() -> None:
    """Of each class a clip of the same digit: at one height they have the same eight frames."""
    made = sideways_clips(DIGITS[:1].expand(256, -1, -1, -1))
    assert made.images.shape == (256, 8, 24, 24)
    assert made.labels.bincount().tolist() == [64] * 4
    heights = made.images.amax((1, 3)).ne(0).long().argmax(1)
    assert sorted(set(heights.tolist())) == list(range(11))
    made = Split(made.images[heights == heights[0]], made.labels[heights == heights[0]])
    assert set(made.labels.tolist()) == {0, 1, 2, 3}
    frames = [{frame.numpy().tobytes() for frame in clip} for clip in made.images]
    assert len(frames[0]) == 8
    assert all(each == frames[0] for each in frames)
    # and the order does tell: the place moves by so many of eight
    known = {frame.numpy().tobytes(): place for place, frame in enumerate(made.images[0])}
    for clip, label in zip(made.images, made.labels, strict=True):
        places = [known[frame.numpy().tobytes()] for frame in clip[:2]]
        first = STEPS[int(made.labels[0])]
        assert (places[1] - places[0]) * first % 8 == STEPS[label]


def test_a_network_sees_the_order_of_frames_by_shifts_alone() -> None:
    torch.manual_seed(0)
    block = nn.Module()
    block.conv1, block.conv2 = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
    block.forward = lambda x: block.conv2(torch.relu(block.conv1(x)))  # type: ignore[method-assign]
    layers = (nn.Conv2d(1, 8, 1), block, nn.Flatten(), nn.Linear(8 * 4, 3))
    network = nn.Sequential(*layers)
    clip = torch.randn(2, 8, 2, 2)
    backwards = clip.flip(1)
    frames = [
        network(each.reshape(-1, 1, 2, 2)).view(2, 8, 3).mean(1) for each in (clip, backwards)
    ]
    assert torch.allclose(*frames, atol=1e-6)
    shifted = ClipNetwork(network, 8)
    assert not torch.allclose(shifted(clip), shifted(backwards), atol=1e-3)


def test_each_clip_is_shuffled_in_an_order_of_its_own() -> None:
    """One order for a whole batch left 64 % of the answers right: a class was still one motion."""
    clips = torch.arange(8.0).repeat_interleave(3).view(1, 24, 1, 1).expand(32, -1, 2, 2)
    mixed = Video().shuffled(clips)[:, :, 0, 0].unflatten(1, (8, 3))
    assert (mixed == mixed[:, :, :1]).all()  # the colours of a frame stay together
    orders = mixed[:, :, 0]
    assert (orders.sort(1).values == torch.arange(8.0)).all()
    assert len({tuple(each) for each in orders.tolist()}) > 16


def test_a_shift_keeps_clips_apart() -> None:
    x = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 8, 1, 1)  # two clips of three frames
    y = FrameShift(3)(x)[:, :3, 0, 0]
    assert y[:, 0].tolist() == [1, 2, 0, 4, 5, 0]
    assert y[:, 1].tolist() == [0, 0, 1, 0, 3, 4]
    assert y[:, 2].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Image = pytest.importorskip("PIL.Image")
    root = tmp_path / "20bn-something-something-v1"
    for clip in range(1, 4):
        (root / str(clip)).mkdir(parents=True)
        for frame in range(1, 7):
            colour = (40 * frame, 40, 40)
            Image.new("RGB", (24, 20), colour).save(root / str(clip) / f"{frame:05}.jpg")
    (tmp_path / "train_videofolder.txt").write_text("1 6 0\n2 6 1\n")
    (tmp_path / "val_videofolder.txt").write_text("3 6 1\n")
    small = dataclasses.replace(sources.SOMETHING, samples=(2, 1))
    monkeypatch.setitem(sources.PUBLISHED, "something-something", small)
    return tmp_path


def something(folders: Path, frames: int = 3) -> Setting:
    return Setting(
        Data("something-something", path=str(folders), size=16, normalize="none"),
        task=TaskSpec("video", {"frames": frames}),
    )


def test_frames_are_read_from_folders(folders: Path) -> None:
    sets = load_sets(something(folders))
    assert (sets.classes, sets.shape) == (174, (9, 16, 16))
    images, labels = next(sets.test.batches(1))
    # the middles of three parts of six frames: 2, 4 and 6, told by their red
    red = images[0, ::3, 8, 8] * 255 / 40
    assert red.round().tolist() == [2, 4, 6]
    assert labels.tolist() == [1]
    options = {"seed": 1, "augment": True, "shuffle": True}
    first, again = (next(sets.train.batches(2, **options))[0] for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(first, again)


def test_clips_that_are_too_short_are_named_before_training(folders: Path) -> None:
    asked = something(folders, frames=7)
    with pytest.raises(OptionError, match=r"v1/1 has 6 frames, and 7 are asked for"):
        make_task(asked).locate(asked)
    (folders / "val_videofolder.txt").write_text("3 six 1\n")
    with pytest.raises(NormkitError, match=r"val_videofolder\.txt, line 1: expected FOLDER"):
        make_task(asked).locate(asked)
    (folders / "val_videofolder.txt").write_text("3 6 1\n3 6 174\n")  # a check let it pass
    with pytest.raises(NormkitError, match=r"txt, line 2: the label is 174, expected 0 to 173\.$"):
        make_task(asked).locate(asked)
    (folders / "val_videofolder.txt").write_text("9 6 1\n")
    with pytest.raises(NormkitError, match=r"v1/9 is not there, and .*line 1 lists it"):
        make_task(asked).locate(asked)
    (folders / "val_videofolder.txt").write_text("3 8 1\n")  # eight are listed, six are there
    with pytest.raises(NormkitError, match=r"3/00008\.jpg is not there, and .* has 8 frames"):
        make_task(asked).locate(asked)


def test_what_cannot_be_a_clip_is_refused(digits: Setting) -> None:
    with pytest.raises(OptionError, match="clips of moving-digits have 8 frames, and 4 are"):
        make_task(dataclasses.replace(digits, task=TaskSpec("video", {"frames": 4})))
    mirrored = dataclasses.replace(digits, data=dataclasses.replace(digits.data, flip=True))
    with pytest.raises(OptionError, match="change what a motion is"):
        make_task(mirrored)
    with pytest.raises(OptionError, match=r"'digits', which has a label.*Try moving-digits"):
        make_task(dataclasses.replace(digits, data=Data("digits")))
    with pytest.raises(OptionError, match="has no blocks with conv1 and conv2"):
        ClipNetwork(nn.Sequential(nn.Conv2d(1, 2, 1)), 8)
    task = make_task(digits)
    assert isinstance(task, Video)
    with pytest.raises(OptionError, match="clips have 9 channels, which are not 8 frames"):
        task.network(digits, 4, (9, 16, 16))
