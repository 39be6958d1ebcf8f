"""Image classifiers and how they are stored."""

from typing import Literal

Format = Literal["onnx", "torch-export"]
"""What models are exported to."""
