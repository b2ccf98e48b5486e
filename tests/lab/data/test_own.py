"""Images of one's own: the same ones as folders, CSV, tar shards and Hugging Face tables."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from normkit.errors import NormkitError, OptionError
from normkit.lab.data import CorruptData, MissingData, fingerprint, load, locate, training_samples
from normkit.lab.data.own import FORMATS, _fingerprint
from normkit.lab.experiment import Data, Run, Setting
from normkit.lab.experiment.records import OWN_DATA

from .small_files import tree

# asked for before a fixture takes the variable away
REAL = filter(None, os.environ.get("NORMKIT_DATA", "").split(os.pathsep))
PACS = [file for each in REAL if (file := Path(each) / "tasks" / "pacs-96.zip").is_file()]
COUNTS = {"train": {"ant": 4, "bee": 3, "cat": 5}, "test": {"ant": 2, "bee": 2, "cat": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own") / "images"
    for part, counts in COUNTS.items():
        tree(made / part, counts)
    return made


def images(folder: Path, part: str) -> list[tuple[Path, str]]:
    return [(file, file.parent.name) for file in sorted((folder / part).glob("*/*.png"))]


def as_csv(folder: Path, to: Path) -> Path:
    rows = [(os.path.relpath(f, to), c, part) for part in COUNTS for f, c in images(folder, part)]
    return write_csv(to / "list.csv", [("path", "label", "split"), *rows])


def write_csv(file: Path, rows: list[tuple[str, ...]]) -> Path:
    with file.open("w", newline="") as content:
        csv.writer(content).writerows(rows)
    return file


def as_shards(folder: Path, to: Path) -> Path:
    for part in COUNTS:
        chosen = images(folder, part)
        for shard, some in enumerate((chosen[:5], chosen[5:])):
            entries = {}
            for file, name in some:
                key = f"{name}{file.stem}"
                entries[f"{key}.png"] = file.read_bytes()
                if shard:
                    entries[f"{key}.json"] = json.dumps({"label": name}).encode()
                else:
                    entries[f"{key}.cls"] = f"{name}\n".encode()
            write_tar(to / f"{part}-{shard}.tar", entries)
    return to


def write_tar(file: Path, entries: dict[str, bytes]) -> None:
    with tarfile.open(file, "w") as archive:
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def hf_table(folder: Path, part: str, names: list[str], broken: Any = None) -> pa.Table:
    chosen = images(folder, part)
    encoded = [{"bytes": f.read_bytes(), "path": None} for f, _ in chosen]
    labels = [names.index(c) for _, c in chosen]
    if broken is not None:
        labels[1] = broken
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"img": pa.array(encoded, kind), "label": pa.array(labels, pa.int64())})
    label = {"names": names, "_type": "ClassLabel"}
    info = {"info": {"features": {"img": {"_type": "Image"}, "label": label}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(info)})


def as_parquet(folder: Path, to: Path) -> Path:
    for part in COUNTS:
        table = hf_table(folder, part, ["ant", "bee", "cat"])
        (to / "data").mkdir(exist_ok=True)
        for i, rows in enumerate((table[:4], table[4:])):
            pq.write_table(rows, to / "data" / f"{part}-0000{i}-of-00002.parquet")
    return to


def as_saved(folder: Path, to: Path) -> Path:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee", "cat"])}
    )
    parts = {}
    for part in COUNTS:
        chosen = images(folder, part)
        columns = {"image": [str(f) for f, _ in chosen], "label": [c for _, c in chosen]}
        parts[part] = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict(parts).save_to_disk(str(to / "saved"), num_shards={"train": 2, "test": 1})
    return to / "saved"


FORMS: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "csv": ("csv", as_csv),
    "shards": ("webdataset", as_shards),
    "parquet": ("huggingface", as_parquet),
    "saved": ("huggingface", as_saved),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_images_of_the_folders(
    form: str, folder: Path, tmp_path: Path
) -> None:
    name, write = FORMS[form]
    spec = Data(name, path=str(write(folder, tmp_path)), size=16, validation=0.25, flip=True)
    ours, theirs = load(spec), load(Data("folder", path=str(folder), size=16, validation=0.25))
    assert (ours.classes, ours.shape) == (theirs.classes, theirs.shape) == (3, (3, 16, 16))
    assert training_samples(spec) == len(ours.train) == 9
    assert locate(spec) == Path(str(spec.path))
    for mine, other in ((ours.validation, theirs.validation), (ours.test, theirs.test)):
        assert mine is not None
        assert other is not None
        (a, labels), (b, same) = next(mine.batches(6)), next(other.batches(6))
        assert torch.equal(a, b)
        assert torch.equal(labels, same)
    # in worker processes as here
    said = {"seed": 3, "epoch": 1, "shuffle": True, "augment": True}
    two = load(spec, workers=2).train.batches(4, **said)
    for (a, _), (b, _) in zip(ours.train.batches(4, **said), two, strict=True):
        assert torch.equal(a, b)


def test_two_csv_files_and_columns_of_other_names(folder: Path, tmp_path: Path) -> None:
    for part in COUNTS:
        rows = [(str(f), str(ord(c[0]) - ord("a"))) for f, c in images(folder, part)]
        file = tmp_path / f"{'val' if part == 'test' else part}.csv"
        write_csv(file, [("photo", "kind"), *rows])
        file.write_text(file.read_text().replace(",", ";"))
    spec = Data("csv", path=str(tmp_path), size=16, image="photo", label="kind")
    sets = load(spec)
    assert sets.classes == 3
    assert next(sets.test.batches(6))[1].tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(CorruptData, match=r"train\.csv has no column for the image, but 'photo'"):
        load(Data("csv", path=str(tmp_path)))


CSV_FAULTS = {
    "missing file": ("nowhere.png,ant,train", MissingData, r"line 4: there is no file \S*nowhere"),
    "class of no training": (
        "a.png,dog,test",
        CorruptData,
        r"line 4: the label is 'dog', expected",
    ),
    "no label": ("a.png,,train", CorruptData, "line 4: the label is empty"),
    "too few values": ("a.png,ant", CorruptData, "line 4: 2 values, expected 3"),
    "unknown part": ("a.png,ant,dev", CorruptData, "line 4: split is 'dev', expected train or"),
}


@pytest.mark.parametrize("fault", CSV_FAULTS)
def test_a_fault_in_a_csv_file_is_told_with_its_line(
    fault: str, folder: Path, tmp_path: Path
) -> None:
    line, error, message = CSV_FAULTS[fault]
    picture = images(folder, "test")[0][0].read_bytes()
    (tmp_path / "a.png").write_bytes(picture)
    text = f"path,label,split\na.png,ant,train\na.png,ant,test\n{line}\n"
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(error, match=message):
        load(Data("csv", path=str(tmp_path / "list.csv")))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["0", "2"], "no image to train on of class 1, and 3 classes"),
        (["0", "1", "-1"], "the label is '-1', expected one of the 2 classes"),
    ],
)
def test_numbers_of_classes_have_no_gaps(
    labels: list[str], message: str, folder: Path, tmp_path: Path
) -> None:
    picture = str(images(folder, "test")[0][0])
    write_csv(tmp_path / "train.csv", [("path", "label"), *((picture, n) for n in labels[:2])])
    write_csv(tmp_path / "test.csv", [("path", "label"), *((picture, n) for n in labels)])
    with pytest.raises(CorruptData, match=message):
        load(Data("csv", path=str(tmp_path)))


def test_a_damaged_entry_is_named(folder: Path, tmp_path: Path) -> None:
    as_shards(folder, tmp_path)
    write_tar(tmp_path / "test-1.tar", {"x9.png": b"no image", "x9.cls": b"ant"})
    with pytest.raises(CorruptData, match=r"test-1\.tar: x9\.png cannot be read as an image"):
        list(load(Data("webdataset", path=str(tmp_path), size=16)).test.batches(9))
    faults = {
        "has png, and no label": {"x9.png": b""},
        "expected one image": {"x9.cls": b"ant"},
        r"x9\.json has no label": {"x9.png": b"", "x9.json": b"{}"},
        "the label is 'dog'": {"x9.png": b"", "x9.cls": b"dog"},
    }
    for message, entries in faults.items():
        write_tar(tmp_path / "test-1.tar", entries)
        with pytest.raises(CorruptData, match=message):
            load(Data("webdataset", path=str(tmp_path)))
    whole = (tmp_path / "train-0.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(whole[:3000])
    with pytest.raises(CorruptData, match=r"train-0\.tar (ends in the middle|cannot be read)"):
        load(Data("webdataset", path=str(tmp_path)))


def test_faults_of_tables(folder: Path, tmp_path: Path) -> None:
    spec = Data("huggingface", path=str(tmp_path), size=16)
    with pytest.raises(MissingData, match="has nothing to train on"):
        locate(spec)
    as_parquet(folder, tmp_path)
    for file in (tmp_path / "data").glob("test*"):
        file.unlink()
    wrong = tmp_path / "test.parquet"
    pq.write_table(hf_table(folder, "test", ["ant", "bee", "cat"], broken=-1), wrong)
    with pytest.raises(CorruptData, match=r"sample 1: label is -1, expected a number from 0 to 2"):
        load(spec)
    pq.write_table(pa.table({"image": [1.0], "label": [0]}), wrong)
    with pytest.raises(CorruptData, match="'image' holds double, expected encoded images"):
        load(spec)
    wrong.write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptData, match=r"test\.parquet cannot be read"):
        load(spec)


def test_every_form_needs_a_path_that_is_there(tmp_path: Path) -> None:
    for name in FORMATS:
        with pytest.raises(OptionError, match=f"data.path is missing: data.name = '{name}' needs"):
            locate(Data(name))
        with pytest.raises(MissingData, match="nowhere"):
            locate(Data(name, path=str(tmp_path / "nowhere")))
    assert set(FORMATS) == set(OWN_DATA)
    with pytest.raises(OptionError, match=r"data\.label belongs to images of your own"):
        load(Data("digits", label="x"))


@pytest.mark.parametrize("form", ["csv", "shards", "parquet"])
def test_runs_are_known_by_the_images(form: str, folder: Path, tmp_path: Path) -> None:
    name, write = FORMS[form]
    places = [tmp_path / "a", tmp_path / "b"]
    specs = []
    for place in places:
        place.mkdir()
        tree(place / "images" / "train", COUNTS["train"])
        tree(place / "images" / "test", COUNTS["test"])
        specs.append(Data(name, path=str(write(place / "images", place))))
    here, there = (Run(Setting(spec), 1).id for spec in specs)
    assert here == there
    _fingerprint.cache_clear()  # as in the next process
    tree(places[1] / "images" / "train", {"ant": 5})
    write(places[1] / "images", places[1])
    assert Run(Setting(specs[1]), 1).id != here
    stated = Data(name, path=specs[1].path, fingerprint=fingerprint(specs[0]))
    assert Run(Setting(stated), 1).id == here
    with pytest.raises(CorruptData, match=r"is not the data of data\.fingerprint"):
        load(stated)


def test_without_the_images_a_fingerprint_tells_which_results_are_meant(tmp_path: Path) -> None:
    with pytest.raises(NormkitError, match=r"put data\.fingerprint in the file"):
        _ = Run(Setting(Data("csv", path=str(tmp_path / "gone.csv"))), 1).id


def test_pacs_as_folders_and_as_csv(tmp_path: Path) -> None:
    if not PACS:
        pytest.skip("no folder of NORMKIT_DATA holds tasks/pacs-96.zip")
    with zipfile.ZipFile(PACS[0]) as archive:
        archive.extractall(tmp_path)
    rows = [("path", "label", "split")]
    for part, domain in (("train", "art_painting"), ("test", "photo")):
        (tmp_path / part).symlink_to(tmp_path / "PACS" / domain)
        found = sorted((tmp_path / part).glob("*/*"))
        rows += [(str(file.relative_to(tmp_path)), file.parent.name, part) for file in found]
    spec = Data("csv", path=str(write_csv(tmp_path / "pacs.csv", rows)), size=32)
    listed, walked = load(spec), load(Data("folder", path=str(tmp_path), size=32))
    assert (len(listed.train), len(listed.test), listed.classes) == (2048, 1670, 7)
    assert (len(walked.train), len(walked.test), walked.classes) == (2048, 1670, 7)
    a, b = next(listed.test.batches(100)), next(walked.test.batches(100))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
