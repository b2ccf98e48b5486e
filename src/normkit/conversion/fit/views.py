"""Images seen in another way: flipped and cropped at random. Pure."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_AREA = 0.5  # of the image that a crop shows
SHAPE = math.log(4 / 3)  # how far width and height of a crop go apart, at most
LEAST_SIDE = 8  # pixels, of what is taken for an image


def flipped_and_cropped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image (N, C, H, W) mirrored with probability 1/2, and a part of it in full size.

    What has another form, or is smaller than images are, is returned as it is.
    """
    if images.dim() != 4 or min(images.shape[2:]) < LEAST_SIDE or not images.is_floating_point():
        return images
    count = len(images)

    def random() -> Tensor:
        return torch.rand(count, generator=generator)

    side = (LEAST_AREA + (1 - LEAST_AREA) * random()).sqrt()
    shape = torch.exp((random() - 0.5) * SHAPE)
    width, height = (side * shape).clamp(max=1), (side / shape).clamp(max=1)
    map_ = torch.zeros(count, 2, 3)  # from places in the crop to places in the image, in -1 … 1
    map_[:, 0, 0] = width * torch.where(random() < 0.5, -1.0, 1.0)
    map_[:, 1, 1] = height
    map_[:, 0, 2] = (2 * random() - 1) * (1 - width)
    map_[:, 1, 2] = (2 * random() - 1) * (1 - height)
    map_ = map_.to(images.device, images.dtype)
    grid = F.affine_grid(map_, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
