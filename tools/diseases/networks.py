"""Small networks for 8×8 images of one channel and ten classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]
Weighted = Callable[[nn.Module], nn.Module]
CLASSES = 10


def conv(before: int, after: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    """A convolution that keeps the size of rectified values, and so trains without a norm."""
    layer = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def plain(layer: nn.Module) -> nn.Module:
    return layer


class Cnn(nn.Module):
    """Three convolutions with norms, the mean over positions, and a linear layer."""

    def __init__(self, norm: Norm, weighted: Weighted = plain, drop: float = 0.0) -> None:
        super().__init__()
        self.conv1, self.norm1 = weighted(conv(1, 16)), norm(16)
        self.conv2, self.norm2 = weighted(conv(16, 32, 2)), norm(32)
        self.conv3, self.norm3 = weighted(conv(32, 32)), norm(32)
        self.act, self.drop = nn.ReLU(), nn.Dropout(drop)
        self.head = nn.Linear(32, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        x = self.act(self.norm2(self.conv2(x)))
        return self.act(self.norm3(self.conv3(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.features(x).mean((2, 3))))


class ColorCnn(Cnn):
    """The same for three colours."""

    def __init__(self, norm: Norm) -> None:
        super().__init__(norm)
        self.conv1 = conv(3, 16)


class DroppedCnn(Cnn):
    """The same with dropout in front of the norms."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        x = self.act(self.norm2(self.drop(self.conv2(x))))
        x = self.act(self.norm3(self.drop(self.conv3(x))))
        return self.head(x.mean((2, 3)))


class SharedCnn(Cnn):
    """The same with one norm for the second and third convolution."""

    def __init__(self, norm: Norm) -> None:
        super().__init__(norm)
        del self.norm3
        with torch.no_grad():
            self.conv3.get_parameter("weight").mul_(4)

    def features(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        x = self.act(self.norm2(self.conv2(x)))
        return self.act(self.norm2(self.conv3(x)))


class CheckpointedCnn(Cnn):
    """The same with activation checkpointing, which computes the forward twice."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.features, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A residual block: convolution and norm twice, added to a shortcut."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(before, after, stride), norm(after)
        self.conv2, self.norm2 = conv(after, after), norm(after)
        self.act = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(conv(before, after, stride, 1), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three residual blocks and a linear layer."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.stem, self.norm, self.act = conv(1, 8), norm(8), nn.ReLU()
        self.blocks = nn.Sequential(
            Block(8, 8, 1, norm), Block(8, 16, 2, norm), Block(16, 16, 1, norm)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.act(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class PreActBlock(nn.Module):
    """A residual block with norms in front of the convolutions, whose sum nothing normalizes."""

    def __init__(self, channels: int, norm: Norm, weighted: Weighted) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels), weighted(conv(channels, channels))
        self.norm2, self.conv2 = norm(channels), weighted(conv(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(torch.relu(self.norm1(x)))
        return x + self.conv2(torch.relu(self.norm2(y)))


class PreActNet(nn.Module):
    """A convolution, two blocks with norms first, a last norm and a linear layer."""

    def __init__(self, norm: Norm, weighted: Weighted = plain) -> None:
        super().__init__()
        self.stem = weighted(conv(1, 16, 2))
        self.blocks = nn.Sequential(*(PreActBlock(16, norm, weighted) for _ in range(2)))
        self.norm, self.head = norm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Mlp(nn.Sequential):
    """Linear layers with norms."""

    def __init__(self, norm: Norm, width: int = 48, depth: int = 4) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        before = 64
        for _ in range(depth):
            layers += [nn.Linear(before, width, bias=False), norm(width), nn.ReLU()]
            before = width
        super().__init__(*layers, nn.Linear(before, CLASSES))
