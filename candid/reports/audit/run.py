"""All studies of one or more models; finished ones are cached, so that a stopped audit continues."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from candid._support.errors import CandidError, NonFiniteError, lacking
from candid._support.options import as_command, build
from candid._support.progress import SILENT, Progress
from candid._support.text import plural, short_name
from candid.evaluation.evaluate import evaluate
from candid.evaluation.options import CompareOptions, EvaluateOptions
from candid.evaluation.result import EvaluationResult, remove_older
from candid.evaluation.result import write as write_evaluation
from candid.explanations.options import ExplainOptions
from candid.explanations.overview import explain
from candid.reports.audit.examples import examples
from candid.reports.audit.options import AuditOptions
from candid.reports.audit.record import NO_NETWORK, STUDIES, AuditedModel, AuditResult, audited_models
from candid.robustness.attacks.benchmark import NO_DETECTION, attack, write_attack_tables
from candid.robustness.attacks.metrics import AttackResult
from candid.robustness.corruptions.benchmark import NO_MCE, check_names, corrupt
from candid.robustness.corruptions.metrics import CorruptionResult, write_tables
from candid.robustness.options import STEPS, AttackOptions, CorruptOptions
from candid.trust.promises import ExamineOptions

STEP_SECONDS = 0.07
"""Measured for each step of an attack on one photo through the default eye, on one core."""


def audit(
    models: Any = (), data: str | None = None, progress: Progress = SILENT, **options: Any
) -> AuditResult:
    """Run every study of one or more models on one data set.

    Args:
        models: a model, a bundled name, a model folder, a run folder, or a list of these; none with stored
            arrays, the options ``held_out`` and ``test``.
        data: a data set with labels, as for :func:`candid.train`; None with stored arrays.
        progress: shows what is being done.
        options: the fields of :class:`~candid.reports.audit.options.AuditOptions`; ``ood`` may also be a
            dictionary of other sets by name.

    Returns:
        Everything that was found; :func:`candid.reports.audit.page.write` makes the page and the JSON file.

    Example:
        >>> import candid
        >>> candid.audit("cifar10-beta1", "digits", attack_image=2)
        Traceback (most recent call last):
        ...
        candid._support.errors.CandidError: There is no option 'attack_image': did you mean 'attack_images'?
    """
    if isinstance(options.get("ood"), dict):
        options["ood"] = tuple(f"{name}={path}" for name, path in options["ood"].items())
    chosen = build(AuditOptions, options)
    check_names(chosen.corruptions)
    if chosen.out.is_file():
        raise CandidError(f"'{chosen.out}' is a file: name a folder for the audit with --out.")
    named = [models] if not isinstance(models, list | tuple) else list(models)
    if chosen.held_out is not None or chosen.test is not None:
        if not named and data is None:
            return _of_arrays(chosen, progress)
        if chosen.held_out is None or chosen.test is None:
            raise CandidError("Stored arrays next to a model are given by --held-out and --test: add both.")
    if not named or data is None:
        raise CandidError("Give MODEL and --data DATA, or stored arrays by --held-out and --test.")
    loaded, can_index = audited_models(named, data, chosen)
    sizes = chosen.sampled(any("eye" in audited.model.can for audited in loaded))
    study = _Auditor(AuditResult(data, sizes, loaded), progress, can_index)
    study.evaluate()
    study.corrupt()
    study.attack()
    study.explain()
    study.choose_examples()
    if chosen.held_out is not None:
        study.add_arrays()
    return study.result


def _of_arrays(options: AuditOptions, progress: Progress) -> AuditResult:
    """Return the audit of stored arrays: everything that needs no network."""
    alone = replace(options, images=None, quick=False) if options.quick else options
    model, evaluation, command = _evaluated_arrays(alone, options.ood, progress)
    commands = {"evaluate": [command]}
    commands |= {option: [] for option in ("compare", "corrupt", "attack", "explain", "examine")}
    absent = dict.fromkeys(STUDIES, NO_NETWORK)
    return AuditResult(str(options.test), options, [model], [evaluation], absent=absent, commands=commands)


def _evaluated_arrays(
    options: AuditOptions, ood: tuple[str, ...], progress: Progress
) -> tuple[AuditedModel, EvaluationResult, str]:
    """Return the classifier behind stored arrays, its evaluation, and the command that repeats it."""
    progress.log("evaluating stored arrays")
    asked = EvaluateOptions(
        **{option: getattr(options, option) for option in ("held_out", "test", "by", "risk", "delta")},
        **{option: getattr(options, option) for option in ("images", "part", "skip_bad", "name")},
        ood=ood,
        temperature=True,
    )
    evaluation = evaluate(progress=progress, **vars(asked))
    assert evaluation is not None
    name = evaluation.metrics["model"]
    model = AuditedModel(name, str(options.test), None, evaluation.metrics["held_out_images"])
    folder = options.out / "evaluation" / model.folder
    remove_older(folder, write_evaluation(evaluation, folder))
    return model, evaluation, as_command("candid evaluate", [], asked)


class _Auditor:
    """One audit while it runs."""

    def __init__(self, result: AuditResult, progress: Progress, can_index: bool) -> None:
        self.result, self.progress, self.can_index = result, progress, can_index
        self.data, self.options, self.models = result.data, result.options, list(result.models)
        self.common: dict[str, Any] = {"part": self.options.part, "skip_bad": self.options.skip_bad}

    def _arguments(self, options: Any) -> dict[str, Any]:
        """Return the keyword arguments of a study: its options, with the files of this audit."""
        return vars(options) | {"out": self.options.out, "devices": 1, "workers": self.options.workers}

    def evaluate(self) -> None:
        """Evaluate each model; one without held-out scores has no outlier scores."""
        lines = []
        for audited in self.models:
            self.progress.log(f"evaluating {audited.name}")
            options = EvaluateOptions(
                ood=self.options.of_images if audited.held_out else (),
                ten_crop=self.options.ten_crop,
                temperature=bool(audited.held_out),
                by=self.options.by if audited.held_out else None,
                risk=self.options.risk if audited.held_out else None,
                delta=self.options.delta,
                images=self.options.images,
                **self.common,
            )
            evaluation = evaluate(audited.model, self.data, self.progress, **self._arguments(options))
            assert evaluation is not None
            evaluation.metrics["model"] = audited.path
            folder = self.options.out / "evaluation" / audited.folder
            remove_older(folder, write_evaluation(evaluation, folder))
            self.result.evaluations.append(evaluation)
            if audited.folder != short_name(Path(audited.path)):  # two models would have the same folder
                options = replace(options, out=Path("evaluation") / audited.folder)
            lines.append(as_command("candid evaluate", [audited.path, self.data], options))
        folders = [Path("evaluation") / audited.folder for audited in self.models]
        self.result.commands["evaluate"] = lines
        self.result.commands["compare"] = [as_command("candid compare", folders, CompareOptions())]

    def add_arrays(self) -> None:
        """Add the classifier behind stored arrays, which must be of the same images in the same order."""
        plain = replace(self.options, part=None, images=None, quick=False, skip_bad=False)
        model, evaluation, command = _evaluated_arrays(plain, self.options.of_arrays, self.progress)
        first = self.result.evaluations[0]
        if model.name in [audited.name for audited in self.models]:
            raise CandidError(f"The name '{model.name}' is taken by a model: choose another one with --name.")
        if evaluation.class_names != first.class_names:
            raise CandidError(
                f"'{self.options.test}' has other class_names than '{self.models[0].name}': store those of "
                "the model, in its order."
            )
        if evaluation.predictions.labels.tolist() != first.predictions.labels.tolist():
            raise CandidError(
                f"'{self.options.test}' is not of the {len(first.predictions):,} test images of "
                f"'{self.data}' in their order: store these, or audit the arrays alone."
            )
        self.result.models.append(model)
        self.result.evaluations.append(evaluation)
        self.result.commands["evaluate"].append(command)

    def corrupt(self) -> None:
        """Corrupt images; errors are relative to those of the first ResNet, if there is one."""
        if self.options.corruption_images == 0:
            self.result.absent["corruptions"] = "No corruptions were asked for (--corruption-images 0)."
            return
        self.progress.log("corrupting images")
        resnets = [audited for audited in self.models if audited.is_resnet]
        images = self.options.corruption_images
        options = CorruptOptions(
            corruptions=self.options.corruptions,
            severities=self.options.severities,
            baseline=resnets[0].path if resnets else None,
            images=self.options.images if images is None else images,
            **self.common,
        )
        named = {audited.name: audited.model for audited in self.models}
        baseline = {"baseline": resnets[0].name if resnets else None}
        corruptions = corrupt(named, self.data, self.progress, **self._arguments(options) | baseline)
        assert corruptions is not None
        write_tables(corruptions, self.options.out / "corruptions")
        self._log_notes(corruptions, NO_MCE)
        self.result.corruptions = corruptions
        positionals = [*(audited.path for audited in self.models), self.data]
        self.result.commands["corrupt"] = [as_command("candid corrupt", positionals, options)]

    def attack(self) -> None:
        """Attack the models; those without held-out scores have no detector, so they form a second group."""
        if self.options.attack_images == 0:
            self.result.absent["attacks"] = "No attacks were asked for (--attack-images 0)."
            return
        if not self.can_index:
            self.result.absent["attacks"] = "Tar shards are read in order: attacks need a folder of images."
            return
        if (missing := lacking("paper", "An attack")) is not None:
            self.result.absent["attacks"] = str(missing)
            return
        self.progress.log("attacking")
        if any("eye" in audited.model.can for audited in self.models):
            self.progress.log(self._long())
        bare = [audited for audited in self.models if audited.is_generative and not audited.held_out]
        others = [audited for audited in self.models if audited not in bare]
        groups = [group for group in (others, bare) if group]
        results, lines = [], []
        for group in groups:
            options = self._attack_options(group, detected=group is not bare)
            named = {audited.name: audited.model for audited in group}
            attacks = attack(named, self.data, self.progress, **self._arguments(options))
            assert attacks is not None
            self._log_notes(attacks, NO_DETECTION)
            results.append(attacks)
            positionals = [*(audited.path for audited in group), self.data]
            lines.append(as_command("candid attack", positionals, options))
        by_name = {attacked.name: attacked for attacks in results for attacked in attacks}
        attacked_models = tuple(by_name[audited.name] for audited in self.models)
        self.result.attacks = replace(results[0], models=attacked_models)
        write_attack_tables(self.result.attacks, self.options.out / "attack-tables")
        self.result.commands["attack"] = lines

    def _long(self) -> str:
        """Return how long attacks through an eye take."""
        chosen = self._attack_options(self.models, detected=True)
        seen = sum("eye" in audited.model.can for audited in self.models)
        steps = STEPS[chosen.method] if chosen.steps is None else chosen.steps
        minutes = STEP_SECONDS * steps * len(chosen.settings) * chosen.images * seen / 60
        less = "--attack-images" if self.options.quick else "--quick or --attack-images"
        return (
            f"Attacks through an eye take long: {plural(chosen.images, 'image')}, "
            f"{plural(len(chosen.settings), 'setting')} and up to {steps} steps, about "
            f"{plural(math.ceil(minutes), 'minute')} of a core; {less} makes it less."
        )

    def _attack_options(self, group: Sequence[AuditedModel], detected: bool) -> AttackOptions:
        fooled = detected and any(audited.is_generative for audited in group)
        return AttackOptions(
            images=self.options.attack_images or 1,
            kappa=self.options.kappa,
            d=self.options.d if fooled else (0.0,),
            steps=self.options.steps,
            **self.common,
        )

    def _log_notes(self, result: CorruptionResult | AttackResult, advice: str) -> None:
        """Show the notes of a study, except advice about an option that an audit does not have."""
        for note in result.notes:
            if note.topic != advice:
                self.progress.log(note.text)

    def explain(self) -> None:
        """Explain each generative model; the first is compared with ResNets by receptive fields."""
        generative = [audited for audited in self.models if audited.is_generative]
        if not generative:
            resnets = all(audited.is_resnet for audited in self.models)
            has = (
                "A ResNet has no latent space"
                if resnets
                else "No model here has class means in a latent space"
            )
            self.result.absent["explanations"] = f"{has}: add a generative model."
        fields: dict[str, Any] = {}
        lines = []
        for audited in generative:
            self.progress.log(f"explaining {audited.name}")
            others = [other for other in self.models if self._is_comparable(audited, other)]
            others = others if audited is generative[0] and self.can_index else []
            options = ExplainOptions(data=self.data if self.can_index else None, **self.common)
            arguments = vars(options) | {"workers": self.options.workers}
            compared = [other.model for other in others]
            try:
                overview = explain(audited.model, compare_with=compared, progress=self.progress, **arguments)
            except NonFiniteError as error:  # some networks can't be inverted far from real images
                topic = f"explanations of {audited.name}"
                self.result.absent[topic] = f"{audited.name} can't be explained: {error}"
                continue
            names = [audited.name, *(other.name for other in others)]
            by_name = dict(zip(names, overview.fields.values(), strict=False))
            fields |= by_name
            self.result.overviews[audited.name] = replace(overview, fields=by_name)
            line = as_command("candid explain", [audited.path], options)
            lines.append(" ".join([line, *(f"--compare-with {quote(other.path)}" for other in others)]))
        self.result.fields = {
            audited.name: fields[audited.name] for audited in self.models if audited.name in fields
        }
        self.result.commands["explain"] = lines

    @staticmethod
    def _is_comparable(model: AuditedModel, other: AuditedModel) -> bool:
        same = other.model.image_shape == model.model.image_shape
        return same and other.is_resnet and model.model.density_of == "pixels"

    def choose_examples(self) -> None:
        """Examine a few images, with a page for each generative model."""
        self.result.commands["examine"] = []
        generative = [audited for audited in self.models if audited.is_generative]
        if generative and not self.can_index:
            reason = "Images of tar shards can't be looked up: examples need a folder of images."
            self.result.absent["examples"] = reason
            return
        self.result.examples = examples(
            self.data, self.options, self.models, self.result.evaluations, self.progress
        )
        paths = [str(example.path) for example in self.result.examples]
        for audited in generative if paths else []:
            line = as_command("candid examine", [audited.path, *paths], ExamineOptions())
            self.result.commands["examine"].append(f"{line} --figures pages/{audited.folder}")
