"""Training: configuration, loop, run folder, resuming."""

from candid.training.config import TrainConfig, load_config, recipes, resumed
from candid.training.folder import RunFolder
from candid.training.loop import Outcome, train
from candid.training.progress import Progress

__all__ = ["Outcome", "Progress", "RunFolder", "TrainConfig", "load_config", "recipes", "resumed", "train"]
