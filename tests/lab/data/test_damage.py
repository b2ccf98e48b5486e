"""A file that is missing or damaged is named, with what to do; a good copy elsewhere is found."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from normkit.errors import OptionError, UnknownName
from normkit.lab.data import CorruptData, MissingData, load, locate, names
from normkit.lab.data import files as data_files
from normkit.lab.experiment import Data

from .small_files import archive, cifar_parts, idx, mnist, pixels, unpacked, usps

GET = r"torchvision\.datasets\.MNIST"


def flip_a_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    later = file.stat().st_mtime_ns + 1_000_000_000  # some file systems have coarse clocks
    os.utime(file, ns=(later, later))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingData, match=rf"mnist was not found.*NORMKIT_DATA is not set.*{GET}"):
        locate(Data("mnist"))
    monkeypatch.setenv("NORMKIT_DATA", os.pathsep.join(["/first", "/second"]))
    with pytest.raises(MissingData, match=r"not found in /first, /second"):
        load(Data("mnist"))
    with pytest.raises(MissingData, match=r"data\.path"):
        locate(Data("mnist", path="/third"))


def test_found_by_the_environment(tmp_path: Path, publish, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist(tmp_path / "b" / "mnist")
    publish("mnist", tmp_path, (30, 20))
    monkeypatch.setenv("NORMKIT_DATA", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert locate(Data("mnist")) == tmp_path / "b" / "mnist"


def test_found_in_the_working_directory(
    tmp_path: Path, publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path / "data" / "MNIST" / "raw")
    publish("mnist", tmp_path, (30, 20))
    monkeypatch.chdir(tmp_path)
    assert locate(Data("mnist")) == Path("data/MNIST/raw")


def test_one_file_missing(tmp_path: Path, publish) -> None:
    mnist(tmp_path)
    publish("mnist", tmp_path, (30, 20))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingData, match=rf"incomplete: \S*t10k-labels-idx1-ubyte missing.*{GET}"):
        locate(Data("mnist", path=str(tmp_path)))


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("damage", [cut, lambda file: flip_a_bit(file, 3000)], ids=["cut", "bit"])
def test_damaged_idx(tmp_path: Path, publish, damage, ending: str) -> None:
    mnist(tmp_path, ending=ending)
    publish("mnist", tmp_path, (30, 20))
    damage(tmp_path / f"train-images-idx3-ubyte{ending}")
    with pytest.raises(CorruptData, match=rf"train-images-idx3-ubyte{ending} .*{GET}"):
        locate(Data("mnist", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [(cut, r"bytes, [\d,]+ fewer"), (lambda f: flip_a_bit(f, 5000), "its MD5 is [0-9a-f]{32}")],
    ids=["cut", "bit"],
)
def test_damaged_archive(tmp_path: Path, publish, damage, said: str) -> None:
    file = tmp_path / "cifar-10-binary.tar.gz"
    archive(file, "cifar-10-batches-bin", cifar_parts("cifar10", binary=True))
    publish("cifar10", tmp_path, (100, 20))
    assert locate(Data("cifar10", path=str(tmp_path))) == file
    damage(file)
    with pytest.raises(
        CorruptData, match=rf"cifar-10-binary\.tar\.gz is not as published: .*{said}"
    ):
        load(Data("cifar10", path=str(tmp_path)))


def test_damaged_part(tmp_path: Path, publish) -> None:
    unpacked(tmp_path / "cifar-10-batches-bin", cifar_parts("cifar10", binary=True))
    publish("cifar10", tmp_path, (100, 20))
    flip_a_bit(tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin", 0)
    with pytest.raises(CorruptData, match=r"data_batch_3\.bin is not as published"):
        locate(Data("cifar10", path=str(tmp_path)))


def test_a_good_copy_further_on_is_taken(
    tmp_path: Path, publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("a", "b"):
        mnist(tmp_path / place)
    publish("mnist", tmp_path / "b", (30, 20))
    cut(tmp_path / "a" / "train-images-idx3-ubyte.gz")
    monkeypatch.setenv("NORMKIT_DATA", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert locate(Data("mnist")) == tmp_path / "b"


@pytest.mark.parametrize(
    "content",
    [b"", gzip.compress(b""), gzip.compress(b"1 2\n"), b"junk"],
    ids=["empty", "nothing packed", "too short", "not packed"],  # packed bytes hold the time
)
def test_text_without_a_published_checksum(tmp_path: Path, publish, content: bytes) -> None:
    usps(tmp_path, 20, svm=False)
    publish("usps", tmp_path, (20, 20))
    (tmp_path / "zip.test.gz").write_bytes(content)
    with pytest.raises(CorruptData, match=r"zip\.test\.gz.*torchvision\.datasets\.USPS"):
        load(Data("usps", path=str(tmp_path)))


def test_too_few_samples(tmp_path: Path, publish) -> None:
    usps(tmp_path, 20, svm=False)
    publish("usps", tmp_path, (21, 20))
    with pytest.raises(CorruptData, match=r"has 20 and 20 images .* expected 21 and 20"):
        load(Data("usps", path=str(tmp_path)))


def test_files_that_do_not_belong_together(tmp_path: Path, publish) -> None:
    mnist(tmp_path)
    idx(tmp_path / "train-images-idx3-ubyte.gz", pixels(29, 28, 28))
    publish("mnist", tmp_path, (30, 20))
    with pytest.raises(CorruptData, match="do not belong together"):
        load(Data("mnist", path=str(tmp_path)))


def test_a_file_is_verified_once_and_again_when_it_changes(
    tmp_path: Path, publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(tmp_path)
    publish("mnist", tmp_path, (30, 20))
    read: list[str] = []
    checksum = data_files.checksum

    def counted(file: Path, packed: bool = False) -> str:
        read.append(file.name)
        return checksum(file, packed)

    monkeypatch.setattr(data_files, "checksum", counted)
    spec = Data("mnist", path=str(tmp_path))
    locate(spec)
    assert len(read) == 4
    locate(spec)
    assert len(read) == 4
    changed = tmp_path / "train-labels-idx1-ubyte.gz"
    flip_a_bit(changed, 12)
    with pytest.raises(CorruptData):
        locate(spec)
    assert read[4:] == [changed.name]


@pytest.mark.parametrize("content", ["", "[1]", '{"a": '])
def test_a_damaged_memory_is_forgotten(tmp_path: Path, publish, content: str) -> None:
    memory = tmp_path / "memory" / "normkit" / "verified.json"
    memory.parent.mkdir(parents=True)
    memory.write_text(content)
    mnist(tmp_path)
    publish("mnist", tmp_path, (30, 20))
    assert locate(Data("mnist", path=str(tmp_path))) == tmp_path
    assert "train-images" in memory.read_text()
    assert [file.name for file in memory.parent.iterdir()] == [memory.name]


def test_nowhere_to_remember(tmp_path: Path, publish) -> None:
    (tmp_path / "memory").write_text("a file where a folder should be")
    mnist(tmp_path)
    publish("mnist", tmp_path, (30, 20))
    assert locate(Data("mnist", path=str(tmp_path))) == tmp_path


def test_unknown_names() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'cifar10'"):
        locate(Data("cifar-10"))
    with pytest.raises(OptionError, match="CxHxWxCLASSESxSAMPLES"):
        locate(Data("synthetic:3x32"))
    with pytest.raises(OptionError, match="40 samples of 10 classes"):
        locate(Data("synthetic:1x8x8x10x40"))
    assert names() == sorted(set(names()))


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"normalize": "datasets"}, "normalize"),
        ({"train": "validation"}, "train"),
        ({"validation": 1.0}, "validation"),
        ({"validation": -0.1}, "validation"),
        ({"subset": 0}, "subset"),
        ({"size": 0}, "size"),
        ({"crop": -1}, "crop"),
        ({"rotation": 181.0}, "rotation"),
        ({"cutout": -1}, "cutout"),
        ({"mixup": -0.2}, "mixup"),
        ({"crop": 4, "resized_crop": True}, "resized_crop"),
    ],
)
def test_impossible_options(said: dict[str, object], key: str) -> None:
    with pytest.raises(OptionError, match=rf"data\.{key}"):
        locate(Data("digits", **said))


def test_a_folder_needs_a_path() -> None:
    with pytest.raises(OptionError, match=r"data\.path is missing"):
        locate(Data("folder"))
