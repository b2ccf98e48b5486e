"""The images that an experiment trains and tests on.

    sets = load(Data("cifar10", flip=True, crop=4), device="cuda")
    for images, labels in sets.train.batches(128, seed=1, epoch=0, shuffle=True, augment=True):
        ...                                  # float32 and normalized, int64; both on the device

**Which sets.** `names()` lists them. digits come with scikit-learn, synthetic is drawn. The others
are found under `Data.path`, in the folders of NORMKIT_DATA, or in ./data; `locate` says where, or
says which file is missing or damaged and how to get it. Nothing is downloaded.

**Small sets** (`TensorLoader`) are bytes on the training device. Whatever is random about an epoch
is drawn at once, on the CPU, from the seed and the epoch alone; so CPU and GPU see the same
pictures, and an epoch can be entered in its middle. `batches` is a loop over two steps, which a
training loop may also take itself, the second inside a CUDA graph:

    plan = sets.train.plan(seed=1, epoch=0)               # (N, COLUMNS) int64; one transfer
    images, labels = sets.train.gather(plan[128:256])     # tensor operations, no wait for the host

**Image files** (`FileLoader`; CUB-200, Stanford Cars, ImageNet, any folder) go through worker
processes; the draws of each image are seeded by seed, epoch and position, so that the number of
workers does not matter. `Data.crop` is how far a crop may move from the middle: small images are
padded by it, image files are scaled to `size` + 2·`crop` first, for evaluation too.

Of somebody's own images (`own`) the list is a tree of folders, a CSV file, tar shards or a Hugging
Face table; all become `Files`, which say how each image is opened.

`batches(..., start=k)` leaves out the first k batches of an epoch, of either kind.

**Soft labels.** `soften` smooths labels; `mix` blends a batch with its neighbours by the weights
that `mixing_weights` has drawn for the epoch.
"""

from normkit.lab.data.loaders import FileLoader as FileLoader
from normkit.lab.data.loaders import Loader as Loader
from normkit.lab.data.loaders import Sets as Sets
from normkit.lab.data.loaders import TensorLoader as TensorLoader
from normkit.lab.data.loading import check as check
from normkit.lab.data.loading import check_kind as check_kind
from normkit.lab.data.loading import classes_and_shape as classes_and_shape
from normkit.lab.data.loading import load as load
from normkit.lab.data.loading import locate as locate
from normkit.lab.data.loading import names as names
from normkit.lab.data.loading import training_samples as training_samples
from normkit.lab.data.own import fingerprint as fingerprint
from normkit.lab.data.records import CorruptData as CorruptData
from normkit.lab.data.records import MissingData as MissingData
from normkit.lab.data.transforms import mix as mix
from normkit.lab.data.transforms import mixing_weights as mixing_weights
from normkit.lab.data.transforms import soften as soften
