"""native:deeplabv3: a class for every pixel, from a ResNet of torchvision.

Chen et al. 2017, without its auxiliary loss. Torchvision's own function has output stride 8 and
takes no basic blocks; here the stages are widened by hand and the head is torchvision's.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError, nearest

BACKBONES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
RATES = {16: (6, 12, 18), 8: (12, 24, 36)}  # of the head's atrous convolutions


class DeepLabV3(nn.Module):
    """Logits (N, classes, H, W) of images (N, 3, H, W); all blocks of a stage have one rate."""

    def __init__(
        self,
        classes: int,
        shape: tuple[int, ...],
        *,
        backbone: str = "resnet101",
        output_stride: int = 16,
    ) -> None:
        super().__init__()
        if backbone not in BACKBONES:
            raise OptionError(f"backbone={backbone!r}. {nearest(str(backbone), BACKBONES)}")
        if output_stride not in RATES:
            raise OptionError(f"output_stride={output_stride}, expected 16 or 8.")
        vision = require("torchvision.models", "models", "DeepLabV3")
        heads = require("torchvision.models.segmentation.deeplabv3", "models", "DeepLabV3")
        network = vision.get_model(backbone, weights=None)
        widened = (network.layer4,) if output_stride == 16 else (network.layer3, network.layer4)
        for power, stage in enumerate(widened):
            dilate(stage, 2**power)
        stem = nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool)
        if shape[0] != 3:
            stem[0] = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        stages = (network.layer1, network.layer2, network.layer3, network.layer4)
        self.backbone = nn.Sequential(stem, *stages)
        width: int = network.fc.in_features
        self.head = heads.DeepLabHead(width, classes, RATES[output_stride])

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.backbone(x))
        return F.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)


def dilate(stage: nn.Module, rate: int) -> None:
    """Let a stage keep the size of its maps: rates instead of strides.

    Its first block has the rate of the stage before, the others twice that, as in slim's networks.
    """
    for number, block in enumerate(stage.children()):
        for module in block.modules():
            if isinstance(module, nn.Conv2d):
                module.stride = (1, 1)
                if module.kernel_size == (3, 3):
                    here = rate if number == 0 else 2 * rate
                    module.dilation = module.padding = (here, here)
