"""native:faster_rcnn and native:mask_rcnn: torchvision's detectors with a ResNet and a pyramid.

All norms are torch's batch norms, wherever the papers have any, so that a variant can put others
there; ``frozen`` makes those of the backbone torchvision's FrozenBatchNorm2d, which is BN† of
estimation-shift and what most fine-tuning does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError, nearest

HEADS = ("2fc", "4conv1fc")
WIDTH = 256  # of the pyramid and of the convolutions in heads
HIDDEN = 1024  # of the linear layers in box heads
LEVELS = 5
RATIOS = (0.5, 1.0, 2.0)
STRIDES = (4, 8, 16, 32)  # of the maps that a pyramid is made of
TIMM = "timm:"


def detector(
    classes: int,
    shape: tuple[int, ...],
    *,
    masks: bool,
    backbone: str = "resnet50",
    head: str = "2fc",
    head_norms: bool = False,
    frozen: bool = False,
    min_size: int = 800,
    max_size: int = 1333,
    resize: bool = True,
    smallest_anchor: int = 32,
    proposals: int = 1000,
    detections: int = 100,
) -> nn.Module:
    """A Faster R-CNN for so many classes, background included; with ``masks`` a Mask R-CNN.

    ``backbone`` is a ResNet or ResNeXt of torchvision, or a network of timm that gives maps at
    strides 4 to 32, such as "timm:tf_efficientnet_lite0", whose trained weights are lite0.
    ``head_norms`` puts norms into the pyramid and the convolutions of the heads. Images are
    scaled until their shorter side has ``min_size`` pixels, or the longer one ``max_size``;
    without ``resize`` they stay as they are. ``proposals`` of an image go into the box head in a
    test, which answers with up to ``detections``; in training it learns from up to 512 of twice
    as many.
    """
    if head not in HEADS:
        raise OptionError(f"head={head!r}. {nearest(str(head), HEADS)}")
    if head_norms and head == "2fc":
        raise OptionError('head_norms needs convolutions in the box head. Try head = "4conv1fc".')
    vision = require("torchvision.models", "models", "detection")
    anchors = require("torchvision.models.detection.anchor_utils", "models", "detection")
    boxes = require("torchvision.models.detection.faster_rcnn", "models", "detection")
    norm = nn.BatchNorm2d if head_norms else None
    pyramid = _pyramid(vision, backbone, frozen, norm)
    sizes = tuple((smallest_anchor * 2**level,) for level in range(LEVELS))
    if head == "2fc":
        box_head: nn.Module = boxes.TwoMLPHead(WIDTH * 7 * 7, HIDDEN)
    else:
        inside = (WIDTH, 7, 7)
        box_head = boxes.FastRCNNConvFCHead(inside, [WIDTH] * 4, [HIDDEN], norm_layer=norm)
    options = {
        "num_classes": classes,
        "backbone": pyramid,
        **pixels_of(backbone),
        "min_size": min_size,
        "max_size": max_size,
        "rpn_anchor_generator": anchors.AnchorGenerator(sizes, (RATIOS,) * LEVELS),
        "box_head": box_head,
        "rpn_post_nms_top_n_test": proposals,
        "rpn_post_nms_top_n_train": 2 * proposals,
        "box_batch_size_per_image": min(512, proposals),
        "box_detections_per_img": detections,
    }
    if not masks:
        return _sized(vision.detection.FasterRCNN(**options), resize)
    heads = require("torchvision.models.detection.mask_rcnn", "models", "Mask R-CNN")
    options["mask_head"] = heads.MaskRCNNHeads(WIDTH, (WIDTH,) * 4, 1, norm_layer=norm)
    return _sized(vision.detection.MaskRCNN(**options), resize)


faster_rcnn = partial(detector, masks=False)
mask_rcnn = partial(detector, masks=True)


def _sized(model: Any, resize: bool) -> nn.Module:
    """The detector; without ``resize`` it leaves images as they are, in tests as in training.

    Torchvision's own switch, _skip_resize, is for training alone: tests are scaled all the same.
    """
    if not resize:
        model.transform.resize = _unchanged
    return model


def _unchanged(image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
    return image, target


def _pyramid(vision: Any, backbone: str, frozen: bool, norm: type[nn.Module] | None) -> nn.Module:
    """A backbone and its feature pyramid; ``norm`` stands in the pyramid."""
    if backbone.startswith(TIMM):
        body, widths = _timm_body(backbone.removeprefix(TIMM), frozen)
        return TimmPyramid(body, widths, norm)
    ops = require("torchvision.ops", "models", "detection")
    pyramids = require("torchvision.models.detection.backbone_utils", "models", "detection")
    names = [name for name in vision.list_models(vision) if name.startswith(("resnet", "resnext"))]
    if backbone not in names:
        names.append("timm:tf_efficientnet_lite0")
        raise OptionError(f"backbone={backbone!r}. {nearest(str(backbone), names)}")
    inside = ops.FrozenBatchNorm2d if frozen else nn.BatchNorm2d
    network = vision.get_model(backbone, weights=None, norm_layer=inside)
    width = network.fc.in_features // 8
    layers = {f"layer{i}": str(i - 1) for i in range(1, 5)}
    widths = [width * 2**i for i in range(4)]
    pyramid: nn.Module = pyramids.BackboneWithFPN(network, layers, widths, WIDTH, norm_layer=norm)
    return pyramid


def _timm_body(name: str, frozen: bool) -> tuple[nn.Module, list[int]]:
    """A network of timm as far as its maps, and how many channels these have."""
    timm = require("timm", "models", "detection")
    if not timm.is_model(name):
        raise OptionError(f"backbone='timm:{name}'. {nearest(name, timm.list_models())}")
    try:
        with torch.device("meta"):
            strides = timm.create_model(name, features_only=True).feature_info.reduction()
        kept = [index for index, stride in enumerate(strides) if stride in STRIDES]
        body = timm.create_model(name, features_only=True, out_indices=kept)
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise OptionError(f"backbone='timm:{name}' gives no maps: {error}.") from error
    if tuple(body.feature_info.reduction()) != STRIDES:
        raise OptionError(
            f"backbone='timm:{name}' has maps at strides {body.feature_info.reduction()}, "
            f"expected {', '.join(map(str, STRIDES))}."
        )
    if frozen:
        body = require("timm.utils.model", "models", "detection").freeze_batch_norm_2d(body)
    return body, body.feature_info.channels()


class TimmPyramid(nn.Module):
    """As torchvision's BackboneWithFPN: the maps of a body at four strides, and a pyramid."""

    def __init__(self, body: nn.Module, widths: list[int], norm: type[nn.Module] | None) -> None:
        super().__init__()
        pyramids = require("torchvision.ops.feature_pyramid_network", "models", "detection")
        self.body, self.out_channels = body, WIDTH
        self.fpn = pyramids.FeaturePyramidNetwork(
            widths, WIDTH, extra_blocks=pyramids.LastLevelMaxPool(), norm_layer=norm
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = {str(i): each for i, each in enumerate(self.body(x))}
        levels: dict[str, Tensor] = self.fpn(maps)
        return levels


def pixels_of(backbone: str) -> dict[str, list[float]]:
    """What a detector does to pixels from 0 to 1, where the backbone was trained otherwise than
    torchvision's: EfficientNet-Lite with (pixel − 127)/128."""
    if not backbone.startswith(f"{TIMM}tf_efficientnet_lite"):
        return {}
    return {"image_mean": [127 / 255] * 3, "image_std": [128 / 255] * 3}
