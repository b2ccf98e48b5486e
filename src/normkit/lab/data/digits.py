"""scikit-learn's digits: 1,797 images of 8×8 with 17 shades, part of the package.

The test part of the Optical Recognition of Handwritten Digits data set by E. Alpaydin and
C. Kaynak (UCI Machine Learning Repository, 1998, doi 10.24432/C50P49; CC BY 4.0), kept here in the
format of MNIST. No split was published: 360 samples, the same share of every class, are the test
set, and they are always the same ones.
"""

from __future__ import annotations

from pathlib import Path

from normkit.lab.data import idx
from normkit.lab.data.records import Raw, Split
from normkit.lab.data.splitting import stratified

TEST = 360
WHITE = 16


def make() -> Raw:
    here = Path(__file__).parent
    images = idx.tensor(here / "digits-images-idx3-ubyte.gz").unsqueeze(1)
    labels = idx.tensor(here / "digits-labels-idx1-ubyte.gz").long()
    test, train = stratified(labels, TEST, "digits")
    return Raw(Split(images[train], labels[train], WHITE), Split(images[test], labels[test], WHITE))
