"""native:wrn, wide residual networks such as WRN-10-2 and WRN-28-10."""

from __future__ import annotations

from torch import Tensor, nn

from normkit.errors import OptionError
from normkit.lab.models.numbers import positive


class WideResNet(nn.Module):
    """A 3×3 stem of 16 channels and three stages of blocks with 16, 32 and 64 times ``width``
    channels: 6n + 4 layers, norm and ReLU before each convolution.

    Zagoruyko & Komodakis 2016. WRN-10-2 is ``depth=10, width=2``, as in bgn's adversarial runs;
    the default is WRN-28-10. ``dropout`` stands between the convolutions of a block.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, int, int],
        *,
        depth: int = 28,
        width: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if positive("depth", depth) < 10 or (depth - 4) % 6:
            near = 6 * max(1, round((depth - 4) / 6)) + 4
            raise OptionError(f"depth is to be 6n + 4, such as {near}, got {depth}.")
        blocks = (depth - 4) // 6
        sizes = [16 * positive("width", width), 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
        self.layer1 = _stage(16, sizes[0], blocks, 1, dropout)
        self.layer2 = _stage(sizes[0], sizes[1], blocks, 2, dropout)
        self.layer3 = _stage(sizes[1], sizes[2], blocks, 2, dropout)
        self.bn1 = nn.BatchNorm2d(sizes[2])
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(sizes[2], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = self.relu(self.bn1(x))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class Block(nn.Module):
    """Norm, ReLU, convolution, twice; where the size changes, the shortcut starts after the first
    ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU()  # not in place: the shortcut may need what came in
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        changes = inputs != outputs or stride > 1
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(x))
        passed = x if self.shortcut is None else self.shortcut(y)
        y = self.drop(self.relu(self.bn2(self.conv1(y))))
        z: Tensor = self.conv2(y) + passed
        return z


def _stage(inputs: int, outputs: int, blocks: int, stride: int, dropout: float) -> nn.Sequential:
    first = Block(inputs, outputs, stride, dropout)
    return nn.Sequential(first, *(Block(outputs, outputs, 1, dropout) for _ in range(blocks - 1)))
