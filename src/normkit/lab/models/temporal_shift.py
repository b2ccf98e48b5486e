"""Temporal shift: a network for images sees clips, with channels moved from frame to frame.

Lin, Gan & Han 2019 (TSM), the residual form: the shift stands at the begin of each block's branch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normkit.errors import OptionError

SHARE = 8  # of the channels one in so many is taken from the next frame, and one from the last


class FrameShift(nn.Module):
    """Of maps (N · frames, C, H, W): some channels from the frame before, some from the next.

    >>> x = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 8, 1, 1)
    >>> FrameShift(3)(x)[:, :3, 0, 0]
    tensor([[1., 0., 0.],
            [2., 0., 1.],
            [0., 1., 2.]])
    """

    def __init__(self, frames: int) -> None:
        super().__init__()
        self.frames = frames

    def forward(self, x: Tensor) -> Tensor:
        clips = x.unflatten(0, (-1, self.frames))
        moved = max(1, clips.shape[2] // SHARE)
        later, earlier, still = clips.split([moved, moved, clips.shape[2] - 2 * moved], dim=2)
        nothing = torch.zeros_like(later[:, :1])
        later = torch.cat([later[:, 1:], nothing], dim=1)
        earlier = torch.cat([nothing, earlier[:, :-1]], dim=1)
        return torch.cat([later, earlier, still], dim=2).flatten(0, 1)


class ClipNetwork(nn.Module):
    """A residual network for images that takes clips (N, frames · C, H, W): the mean of its frames.

    Its norms see every frame as a sample.
    """

    def __init__(self, network: nn.Module, frames: int) -> None:
        super().__init__()
        blocks = [
            module
            for module in network.modules()
            if isinstance(getattr(module, "conv1", None), nn.Conv2d)
            and isinstance(getattr(module, "conv2", None), nn.Conv2d)
        ]
        if not blocks:
            raise OptionError(
                f"{type(network).__name__} has no blocks with conv1 and conv2, where frames could "
                "be shifted. Try torchvision:resnet18."
            )
        for block in blocks:
            block.conv1 = nn.Sequential(FrameShift(frames), block.conv1)  # type: ignore[arg-type]
        self.network, self.frames = network, frames

    def forward(self, x: Tensor) -> Tensor:
        images = x.unflatten(1, (self.frames, -1)).flatten(0, 1)
        logits: Tensor = self.network(images)
        return logits.unflatten(0, (-1, self.frames)).mean(1)
