"""Generative image classifiers that can be trusted: exact p(image | class) from invertible networks."""

from importlib import import_module
from typing import TYPE_CHECKING

from candid._support.errors import CandidError, CheckpointError, NonFiniteError
from candid._support.threads import prepare_threads
from candid._support.version import __version__

if TYPE_CHECKING:
    from candid.evaluation.compare import compare
    from candid.evaluation.evaluate import evaluate
    from candid.evaluation.result import Evaluation
    from candid.explanations.overview import explain
    from candid.models.checkpoint import load, load_any, save
    from candid.models.export import export
    from candid.models.flow.classifier import GenerativeClassifier
    from candid.models.flow.config import ClassifierConfig, FlowConfig
    from candid.models.flow.loss import information_bottleneck_loss
    from candid.models.flow.presets import PRESETS
    from candid.models.importers.released import import_released
    from candid.models.importers.torchvision import import_torchvision
    from candid.models.resnet import ResNet, ResNetConfig
    from candid.reports.audit.run import Audit, audit
    from candid.robustness.attacks.benchmark import AttackResults, attack
    from candid.robustness.corruptions.benchmark import CorruptionResults, corrupt
    from candid.training.adopt import adopt
    from candid.training.refit import Refit, refit
    from candid.training.teach import Teaching, forget, teach
    from candid.training.train import TrainResult, train
    from candid.trust.calibrate import calibrate
    from candid.trust.examine import Unusable, examine, examine_stream
    from candid.trust.group import Grouping, group
    from candid.trust.judge import Judge
    from candid.trust.monitor import Monitor
    from candid.trust.scores import Score, register_score
    from candid.trust.verdict import Examination, Verdict
    from candid.trust.watch import Watch

prepare_threads()  # before anything loads torch

__all__ = [
    "PRESETS",
    "AttackResults",
    "Audit",
    "CandidError",
    "CheckpointError",
    "ClassifierConfig",
    "CorruptionResults",
    "Evaluation",
    "Examination",
    "FlowConfig",
    "GenerativeClassifier",
    "Grouping",
    "Judge",
    "Monitor",
    "NonFiniteError",
    "Refit",
    "ResNet",
    "ResNetConfig",
    "Score",
    "Teaching",
    "TrainResult",
    "Unusable",
    "Verdict",
    "Watch",
    "__version__",
    "adopt",
    "attack",
    "audit",
    "calibrate",
    "compare",
    "corrupt",
    "evaluate",
    "examine",
    "examine_stream",
    "explain",
    "export",
    "forget",
    "group",
    "import_released",
    "import_torchvision",
    "information_bottleneck_loss",
    "load",
    "load_any",
    "refit",
    "register_score",
    "save",
    "teach",
    "train",
]

# These need torch, which takes seconds to import: they are imported when they are first used.
_LAZY = {
    "evaluation.compare": ("compare",),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.result": ("Evaluation",),
    "explanations.overview": ("explain",),
    "models.export": ("export",),
    "models.checkpoint": ("load", "load_any", "save"),
    "models.flow.classifier": ("GenerativeClassifier",),
    "models.flow.loss": ("information_bottleneck_loss",),
    "models.flow.config": ("ClassifierConfig", "FlowConfig"),
    "models.flow.presets": ("PRESETS",),
    "models.importers.released": ("import_released",),
    "models.importers.torchvision": ("import_torchvision",),
    "models.resnet": ("ResNet", "ResNetConfig"),
    "robustness.attacks.benchmark": ("AttackResults", "attack"),
    "robustness.corruptions.benchmark": ("CorruptionResults", "corrupt"),
    "reports.audit.run": ("Audit", "audit"),
    "training.adopt": ("adopt",),
    "training.refit": ("Refit", "refit"),
    "training.teach": ("Teaching", "forget", "teach"),
    "training.train": ("TrainResult", "train"),
    "trust.calibrate": ("calibrate",),
    "trust.examine": ("Unusable", "examine", "examine_stream"),
    "trust.group": ("Grouping", "group"),
    "trust.judge": ("Judge",),
    "trust.monitor": ("Monitor",),
    "trust.scores": ("Score", "register_score"),
    "trust.verdict": ("Examination", "Verdict"),
    "trust.watch": ("Watch",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would believe in every name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'candid' has no attribute '{name}'")
        globals()[name] = value = getattr(import_module(f"candid.{_HOME[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME})
