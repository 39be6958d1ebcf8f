"""Image classifiers that say when not to trust them."""

from importlib import import_module
from typing import TYPE_CHECKING

from candid._support import __version__
from candid._support.errors import CandidError, CheckpointError, NonFiniteError, missing_extra
from candid._support.numbers import prepare_threads

if TYPE_CHECKING:
    from candid.evaluation.compare import compare
    from candid.evaluation.evaluate import evaluate
    from candid.evaluation.result import EvaluationResult
    from candid.explanations.counterfactual import counterfactual
    from candid.explanations.decision_space import decision_spaces
    from candid.explanations.heatmaps import heatmaps
    from candid.explanations.overview import explain
    from candid.inference.predictions import Predictions
    from candid.judging.calibrate import calibrate
    from candid.judging.examine import Examiner, examine, examine_stream
    from candid.judging.group import GroupResult, group
    from candid.judging.held_out import export
    from candid.judging.table_files import table
    from candid.models.checkpoint import load
    from candid.models.flow.classifier import GenerativeClassifier
    from candid.models.flow.config import PRESETS, ClassifierConfig, FlowConfig
    from candid.models.flow.mixture import information_bottleneck_loss
    from candid.models.importers.released import import_released
    from candid.models.importers.torchvision import import_torchvision
    from candid.models.photo.torch_eyes import ModuleEye, ModuleSoftmax
    from candid.models.resnet import ResNet, ResNetConfig
    from candid.models.saving import PushResult, push, save
    from candid.reports.audit.record import AuditResult
    from candid.reports.audit.run import audit
    from candid.robustness.attacks.benchmark import attack
    from candid.robustness.attacks.metrics import AttackResult
    from candid.robustness.corruptions.benchmark import corrupt, corrupted
    from candid.robustness.corruptions.metrics import CorruptionResult
    from candid.training.adopt import adopt
    from candid.training.changes import forget, merge, rename, undo
    from candid.training.refit import RefitResult, refit
    from candid.training.teach import TeachResult, teach
    from candid.training.train import TrainResult, train
    from candid.trust.drift import Watch
    from candid.trust.monitor import Monitor
    from candid.trust.scores import Score, register_score
    from candid.trust.verdict import Examination, UnusableImage

prepare_threads()  # before anything loads torch

__all__ = [
    "PRESETS",
    "AttackResult",
    "AuditResult",
    "CandidError",
    "CheckpointError",
    "ClassifierConfig",
    "CorruptionResult",
    "EvaluationResult",
    "Examination",
    "Examiner",
    "FlowConfig",
    "GenerativeClassifier",
    "GroupResult",
    "ModuleEye",
    "ModuleSoftmax",
    "Monitor",
    "NonFiniteError",
    "Predictions",
    "PushResult",
    "RefitResult",
    "ResNet",
    "ResNetConfig",
    "Score",
    "TeachResult",
    "TrainResult",
    "UnusableImage",
    "Watch",
    "__version__",
    "adopt",
    "attack",
    "audit",
    "calibrate",
    "compare",
    "corrupt",
    "corrupted",
    "counterfactual",
    "decision_spaces",
    "evaluate",
    "examine",
    "examine_stream",
    "explain",
    "export",
    "forget",
    "group",
    "heatmaps",
    "import_released",
    "import_torchvision",
    "information_bottleneck_loss",
    "load",
    "merge",
    "push",
    "refit",
    "register_score",
    "rename",
    "save",
    "table",
    "teach",
    "train",
    "undo",
]

# What takes time to import is imported when it is first used; what needs an extra says so then.
_LAZY = {
    "evaluation.compare": ("compare",),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.result": ("EvaluationResult",),
    "explanations.counterfactual": ("counterfactual",),
    "explanations.decision_space": ("decision_spaces",),
    "explanations.heatmaps": ("heatmaps",),
    "explanations.overview": ("explain",),
    "inference.predictions": ("Predictions",),
    "judging.examine": ("Examiner", "examine", "examine_stream"),
    "judging.group": ("GroupResult", "group"),
    "judging.held_out": ("export",),
    "judging.calibrate": ("calibrate",),
    "judging.table_files": ("table",),
    "models.checkpoint": ("load",),
    "models.flow.classifier": ("GenerativeClassifier",),
    "models.flow.config": ("PRESETS", "ClassifierConfig", "FlowConfig"),
    "models.flow.mixture": ("information_bottleneck_loss",),
    "models.importers.released": ("import_released",),
    "models.importers.torchvision": ("import_torchvision",),
    "models.photo.torch_eyes": ("ModuleEye", "ModuleSoftmax"),
    "models.resnet": ("ResNet", "ResNetConfig"),
    "models.saving": ("PushResult", "push", "save"),
    "reports.audit.record": ("AuditResult",),
    "reports.audit.run": ("audit",),
    "robustness.attacks.benchmark": ("attack",),
    "robustness.attacks.metrics": ("AttackResult",),
    "robustness.corruptions.benchmark": ("corrupt", "corrupted"),
    "robustness.corruptions.metrics": ("CorruptionResult",),
    "training.adopt": ("adopt",),
    "training.changes": ("forget", "merge", "rename", "undo"),
    "training.refit": ("RefitResult", "refit"),
    "training.teach": ("TeachResult", "teach"),
    "training.train": ("TrainResult", "train"),
    "trust.drift": ("Watch",),
    "trust.monitor": ("Monitor",),
    "trust.scores": ("Score", "register_score"),
    "trust.verdict": ("Examination", "UnusableImage"),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}
_RENAMED = {
    "AttackResults": "AttackResult",
    "Audit": "AuditResult",
    "CorruptionResults": "CorruptionResult",
    "Evaluation": "EvaluationResult",
    "Grouping": "GroupResult",
    "Refit": "RefitResult",
    "Teaching": "TeachResult",
    "Unusable": "UnusableImage",
    "load_any": "load",
}
"""Names of version 0.1 and their new ones; version 0.3 may drop them."""

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would believe in every name

    def __getattr__(name: str) -> object:
        if name in _RENAMED:
            import warnings

            warnings.warn(f"candid.{name} is now candid.{_RENAMED[name]}.", DeprecationWarning, stacklevel=2)
            return __getattr__(_RENAMED[name])
        if name not in _HOME:
            raise AttributeError(f"module 'candid' has no attribute '{name}'")
        try:
            globals()[name] = value = getattr(import_module(f"candid.{_HOME[name]}"), name)
        except ModuleNotFoundError as error:
            missing = missing_extra(error, f"candid.{name}")
            if missing is None:
                raise
            raise missing from error
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME})
