"""What is read is what was written, in every layout in which people keep a set."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from normkit.lab.data import CorruptData, load, locate
from normkit.lab.data.array_files import arrays
from normkit.lab.experiment import Data

from .small_files import archive, cifar_parts, labels, mnist, old_pickle, pixels, unpacked, usps

FORMS = {
    ("cifar10", True): ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    ("cifar10", False): ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    ("cifar100", True): ("cifar-100-binary", "cifar-100-binary.tar.gz"),
    ("cifar100", False): ("cifar-100-python", "cifar-100-python.tar.gz"),
}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_idx(tmp_path: Path, publish, ending: str, place: str) -> None:
    mnist(tmp_path / place, 30, 20, ending)
    publish("mnist", tmp_path, (30, 20))
    sets = load(Data("mnist", path=str(tmp_path)))
    assert torch.equal(sets.train.images[:, 0], torch.from_numpy(pixels(30, 28, 28, seed=0)))
    assert torch.equal(sets.test.images[:, 0], torch.from_numpy(pixels(20, 28, 28, seed=1)))
    assert sets.test.labels.tolist() == labels(20).tolist()
    assert (sets.classes, sets.shape) == (10, (1, 28, 28))
    assert locate(Data("mnist", path=str(tmp_path))) == tmp_path / place


def test_idx_compressed_by_somebody_else(tmp_path: Path, publish) -> None:
    """Debian's Fashion-MNIST has other compressed bytes than the publisher's, and one content."""
    mnist(tmp_path / "first", 30, 20, "")
    publish("fashion-mnist", tmp_path / "first", (30, 20))
    mnist(tmp_path / "second" / "fashion-mnist", 30, 20, ".gz")
    assert len(load(Data("fashion-mnist", path=str(tmp_path / "second"))).train) == 30


@pytest.mark.parametrize("packed", [True, False], ids=["archive", "unpacked"])
@pytest.mark.parametrize(("name", "binary"), FORMS)
def test_cifar(tmp_path: Path, publish, name: str, binary: bool, packed: bool) -> None:
    folder, file = FORMS[name, binary]
    parts = cifar_parts(name, binary)
    if packed:
        archive(tmp_path / file, folder, parts)
    else:
        unpacked(tmp_path / folder, parts)
    count = 20 * (len(parts) - 1)
    publish(name, tmp_path, (count, 20))
    sets = load(Data(name, path=str(tmp_path)))
    expected = np.concatenate([pixels(20, 3072, seed=i) for i in range(len(parts) - 1)])
    assert torch.equal(sets.train.images.flatten(1), torch.from_numpy(expected))
    assert torch.equal(
        sets.test.images.flatten(1), torch.from_numpy(pixels(20, 3072, seed=len(parts) - 1))
    )
    assert sets.test.labels.tolist() == labels(20).tolist()  # of cifar100 the fine ones
    assert locate(Data(name, path=str(tmp_path))) == tmp_path / (file if packed else folder)


@pytest.mark.parametrize("svm", [False, True], ids=["zip", "svm"])
def test_usps(tmp_path: Path, publish, svm: bool) -> None:
    values = usps(tmp_path / "usps", 20, svm=svm)
    publish("usps", tmp_path, (20, 20))
    sets = load(Data("usps", path=str(tmp_path), normalize="halves"))
    assert sets.train.labels.tolist() == labels(20).tolist()
    images, _ = sets.train.gather(torch.arange(20))
    # halves undoes the mapping to bytes, whose steps are 1/127.5: half a step, and float32
    error = (images.flatten(1) - torch.from_numpy(values)).abs().max()
    assert error <= 0.5 / 127.5 + 1e-6


def test_pickles_are_not_trusted() -> None:
    class Evil:
        def __reduce__(self) -> object:
            return os.system, ("exit 3",)

    with pytest.raises(CorruptData, match=r"asks for posix\.system"):
        arrays(pickle.dumps({b"data": Evil()}), "here")


def test_pickles_of_other_things() -> None:
    with pytest.raises(CorruptData, match="expected a dictionary"):
        arrays(pickle.dumps([1]), "here")
    with pytest.raises(CorruptData, match="expected bytes"):
        arrays(old_pickle({b"data": np.zeros(3)}), "here")


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_in_either_order(order: str) -> None:
    array = np.asarray(pixels(4, 5), order=order)
    for content in (old_pickle({b"data": array}), pickle.dumps({b"data": array}, protocol=4)):
        assert torch.equal(arrays(content, "here")[b"data"], torch.from_numpy(array))
