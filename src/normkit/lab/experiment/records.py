"""What an experiment is: frozen records, from a question down to a single run.

An ``Experiment`` holds variants; a ``Variant`` has a name, a cell of the grid and a ``Setting``; a
``Setting`` and a seed are a ``Run``, and a run's id is a hash of exactly what its result depends
on. So a seed or a variant that is added later changes the id of no other run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from normkit.lab.results import METRICS, TaskMetric

Options = Mapping[str, Any]
Cell = tuple[tuple[str, Any], ...]  # (("train.worker_batch", 2), …): a point of the grid

# what a result of one release may not be mixed with; goes up when training changes its numbers
PROTOCOL = 1
OWN_DATA = {  # somebody's own images, and what lies at data.path
    "csv": "a CSV file with the columns path, label, split, or a folder with train.csv, test.csv",
    "folder": "a folder with train/CLASS/NAME.jpg and test/CLASS/NAME.jpg",
    "huggingface": "a folder of save_to_disk, or of train*.parquet and test*.parquet",
    "webdataset": "a folder with train*.tar and test*.tar",
    "coco-folder": "a folder with annotations/instances_train.json, instances_test.json, images",
    "voc-folder": "a folder with JPEGImages, Annotations and ImageSets/Main",
    "voc-segmentation-folder": "a folder with JPEGImages, SegmentationClass and ImageSets",
    "frames-folder": "a folder with train.txt, test.txt and frames",
    "new-classes-folder": "a folder with train/CLASS/NAME.jpg and, of other classes, test/CLASS",
    "domains-folder": "a folder with DOMAIN/CLASS/NAME.jpg",
}


@dataclass(frozen=True)
class Data:
    """Which images, how they are cut into sets, and what is done to them on the way."""

    name: str = "digits"
    path: str | None = None  # where to look; else NORMKIT_DATA. Not part of a run's id
    image: str | None = None  # of a table of your own: the column of the images, or of their paths
    label: str | None = None  # and that of their labels
    fingerprint: str | None = None  # of your own images: states which ones are meant
    train: str = "train"  # the published split to train on; estimation shift trains on "test"
    validation: float = 0.0  # share of the training set, the same from every class
    split_seed: int = 0
    subset: int | None = None  # train on so many samples only; the test stays whole
    size: int | None = None  # side of the images; None: as they are
    # none, dataset (mean, std), fixed (x−128)/128, lite (x−127)/128, halves (x−.5)/.5
    normalize: str = "dataset"
    flip: bool = False
    crop: int = 0  # padding of a random crop; of image files a margin: tests see the middle
    resized_crop: bool = False  # area 0.08 to 1, ratio 3/4 to 4/3
    rotation: float = 0.0  # degrees
    cutout: int = 0
    mixup: float = 0.0  # α of the beta distribution
    options: Options = field(default_factory=dict)  # of a function of your own, file.py:make
    augment: tuple[Options, ...] = ()  # of its samples: {use = "RandomCrop", size = 28}, …


@dataclass(frozen=True)
class Model:
    """A network before anything is done to its norms."""

    name: str = "native:small_cnn"  # native:, timm:, torchvision:, package.module:callable
    stem: str = "own"  # or "cifar": 3×3, stride 1, no pooling
    options: Options = field(default_factory=dict)  # of its constructor
    # a file of trained weights to start from, known by its content; or lite0, an installed one
    weights: str | None = None
    fresh: tuple[str, ...] = ()  # of these the parameters that start anew all the same: "fc.*"


@dataclass(frozen=True)
class ModelStep:
    """One change of the model: convert its norms, apply a recipe, or standardize its weights."""

    kind: str  # "norm", "recipe" or "weights"
    name: str  # catalog name, name of a recipe, or ws, wn, cwn
    where: str | None = None  # as in normkit.select; None: everywhere
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Train:
    """Everything between the first batch and the last."""

    epochs: int = 10
    batch: int = 128  # 0: the whole training set
    gpus: int = 1  # that share each batch, a process for each; on a CPU, so many processes
    statistics: str = "process"  # of a process's samples; or "synchronized": of the whole batch
    worker_batch: int | None = None  # statistics as if so many samples were on each worker
    accumulate: int = 1  # batches for each step: the "iteration size"
    optimizer: str = "sgd"  # sgd, adam, adamw, lars, lamb, torch.optim:RMSprop, file.py:Class
    optimizer_options: Options = field(default_factory=dict)  # of one that is not sgd, adam, adamw
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay: str = "all"  # "all" parameters or "weights": no norm parameter, no bias
    slower_scale: float = 1.0  # c of revisiting BN: the norms' scales learn at lr/c
    rates: Options = field(default_factory=dict)  # "layer1.*" -> what lr is multiplied by there
    layer_decay: float = 1.0  # the same, for each part of the model from its last to its first
    schedule: str = "cosine"  # constant, step, cosine, poly, one_cycle, a class of lr_scheduler
    schedule_options: Options = field(default_factory=dict)  # of one_cycle and of such a class
    per: str = "step"  # the schedule moves with every "step" or "epoch"
    milestones: tuple[int, ...] = ()  # epochs
    factor: float = 0.1  # at each milestone
    floor: float = 0.0  # where cosine and poly end
    power: float = 0.9  # of poly
    warmup: float = 0.0  # epochs of linear rise
    clip: float = 0.0  # largest norm of the gradient; 0: none
    ema: float = 0.0  # decay of averaged weights, which are evaluated instead; 0: none
    label_smoothing: float = 0.0
    loss: str = ""  # instead of the task's: torch.nn:HuberLoss, file.py:function
    loss_options: Options = field(default_factory=dict)
    drop_last: bool = False  # leave an incomplete last batch out
    precision: str = "float32"  # or bf16, fp16 (autocast), float64
    channels_last: bool = False
    compile: bool = False
    evaluate_every: int = 1  # epochs; the last, or those that a selection needs, always
    select: str = "last"  # "last", "best_validation" or "median_last_5"
    stop_after: int = 0  # epochs without a better validation score; 0: train them all

    def sharing_statistics(self) -> int:
        """How many samples of a full batch share statistics; 0: the whole training set."""
        alone = self.batch // self.gpus if self.statistics == "process" else self.batch
        return self.worker_batch or alone


@dataclass(frozen=True)
class Watch:
    """What is measured beside loss and accuracy, and how often."""

    measures: tuple[str, ...] = ()  # condensation, esm, stat_diff, disturbance, …
    every: int = 1  # epochs
    samples: int = 32  # of the fixed batch for condensation


@dataclass(frozen=True)
class TaskSpec:
    """What is learned, and how that is judged: a task of ``lab.tasks``, or a class of one's own."""

    name: str = "classification"  # or supervised, file.py:Class, package.module:Class
    options: Options = field(default_factory=dict)  # of its constructor
    metrics: Options = field(default_factory=dict)  # the table [metrics]: further ones, by name


@dataclass(frozen=True)
class OwnCode:
    """The author's own files that a setting names: their source is part of what is run."""

    folder: str = ""  # of the experiment's file: looked for here. Not part of a run's id
    hashes: Options = field(default_factory=dict)  # reference -> hash of the source


@dataclass(frozen=True)
class Setting:
    """All that a run's result depends on, but for the seed."""

    data: Data = Data()
    model: Model = Model()
    steps: tuple[ModelStep, ...] = ()
    train: Train = Train()
    watch: Watch = Watch()
    task: TaskSpec = TaskSpec()
    code: OwnCode = OwnCode()

    @cached_property
    def content(self) -> dict[str, Any]:
        """Whatever differs from the defaults, but for where files lie. Seeds share it."""
        data, code = replace(self.data, path=None), replace(self.code, folder="")
        content: dict[str, Any] = _plain(replace(self, data=data, code=code))
        return content


@dataclass(frozen=True)
class Run:
    """One training: a setting and a seed. Its id is a hash of its content."""

    setting: Setting
    seed: int

    @cached_property
    def id(self) -> str:
        text = json.dumps(self.content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def content(self) -> dict[str, Any]:
        """What the id is made of: whatever differs from the defaults, and the seed.

        Defaults are left out, so that a field that a later release adds changes no id.
        """
        setting = self.setting
        # a path says only where a copy lies: images of one's own are known by what they are
        own = setting.data.name in OWN_DATA and setting.data.path is not None
        known = data_identity(setting.data) if own else None
        if setting.data.fingerprint != known:
            setting = replace(setting, data=replace(setting.data, fingerprint=known))
        return {"protocol": PROTOCOL, "seed": self.seed, "setting": setting.content}

    def torch_seed(self) -> int:
        """The seed as revisiting BN hashes it: the last 32 bits of the MD5 of its digits."""
        return int(hashlib.md5(str(self.seed).encode()).hexdigest()[-8:], 16)


@dataclass(frozen=True)
class Variant:
    """One of the things compared, at one point of the grid."""

    name: str
    setting: Setting
    cell: Cell = ()

    def runs(self, seeds: tuple[int, ...]) -> list[Run]:
        return [Run(self.setting, seed) for seed in seeds]


@dataclass(frozen=True)
class Published:
    """A number that a paper prints for a variant and cell, and where our protocol differs."""

    variant: str
    value: float
    cell: Cell = ()
    std: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """A question, and all that is needed to answer it."""

    name: str  # of the file, without .toml
    title: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    baseline: str  # a variant; each is compared with it in its own cell
    metric: str = "accuracy"  # one of metrics
    scale: str = ""  # of several in the file: paper, lab, desk
    question: str = ""
    source: str = ""  # "UBN, table 3"
    difference: str = ""  # between the published protocol and this one
    equivalence: float = 0.005  # differences smaller than this do not matter
    multiplicity: str = "holm"  # or "none": no correction for the number of comparisons
    losses: str = "unstable"  # the verdict where runs were lost; or "survivors": they decide
    looks: tuple[int, ...] = ()  # planned numbers of seeds to look after, the last is the most
    published: tuple[Published, ...] = ()
    path: Path | None = None
    overrides: tuple[str, ...] = ()  # what --set has changed of the file, as it was typed
    metrics: Mapping[str, TaskMetric] = field(default_factory=lambda: METRICS)  # of its task

    def runs(self) -> list[Run]:
        """Every run once, seeds outermost: what is compared is finished together."""
        runs: dict[str, Run] = {}
        for seed in self.seeds:
            for variant in self.variants:
                run = Run(variant.setting, seed)
                runs.setdefault(run.id, run)
        return list(runs.values())

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(variant.cell for variant in self.variants))

    def variant(self, name: str, cell: Cell = ()) -> Variant:
        return self._by_name[name, cell]

    @cached_property
    def _by_name(self) -> dict[tuple[str, Cell], Variant]:
        return {(variant.name, variant.cell): variant for variant in self.variants}

    @property
    def higher_is_better(self) -> bool:
        return self.metrics[self.metric].higher_is_better


def data_identity(data: Data) -> str:
    """What somebody's own images are known by."""
    from normkit.lab.data.own import identity  # which reads them, and knows these records

    return identity(data)


def variant_label(name: str, cell: Cell) -> str:
    """A variant and its cell as people know them: gn (worker_batch 2)."""
    where = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in cell)
    return f"{name} ({where})" if where else name


def _plain(value: Any) -> Any:
    """As plain data: records without the fields that have their default value.

    1 and 1.0 are one number, and lists and tuples one thing, whoever wrote them.
    """
    if is_dataclass(value):
        values = {each.name: getattr(value, each.name) for each in fields(value)}
        return {
            each.name: _plain(values[each.name])
            for each in fields(value)
            if values[each.name] != _default(each)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _default(record_field: Any) -> Any:
    """The default of a field; a field that has none is always part of the id."""
    factory = record_field.default_factory
    return record_field.default if factory is MISSING else factory()
