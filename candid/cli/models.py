"""The commands about models themselves: list the bundled ones, describe one, import weights."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from candid._support.errors import CandidError, did_you_mean
from candid._support.options import Option
from candid._support.text import METRICS, number, printable
from candid.cli.app import JsonFlag, command, is_model, show_table
from candid.models import zoo


@command
def models(
    name: Annotated[
        str | None,
        Option(
            "Show the card of this bundled model, or of a model of yours. For hf:OWNER/NAME it asks the Hub "
            "for the newest commit.",
            default="all models",
        ),
    ] = None,
    /,
    history: Annotated[bool, Option("Show the changes of a model of yours since its training.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the trained models that come with candid; every command takes their names instead of a folder.

    A folder of a model of yours shows its card: classes, results by class, changes.
    """
    if name is not None and name.startswith(zoo.HUB):
        from candid.models.hub import fetched_model

        found = fetched_model(name, newest=True)
        print(printable(f"{found.name}, licence: {found.licence}"), file=sys.stderr)
        name = found.name
    if name is not None and name not in zoo.MODELS and (name.startswith(zoo.HUB) or Path(name).exists()):
        _show_own(name, history, as_json)
        return
    if history:
        raise CandidError("--history shows the changes of a model of yours: name its folder.")
    cards = [zoo.card(each) for each in (zoo.names() if name is None else [name])]
    if as_json:
        print(json.dumps(cards if name is None else cards[0]))
    elif name is not None:
        from rich.console import Console
        from rich.markdown import Markdown

        from candid.models.zoo import as_markdown

        Console().print(Markdown(as_markdown(cards[0])))
    else:
        columns = ("name", "images", "classes", "beta", "accuracy", "bits/dim", "MB")
        show_table("Models that come with candid", columns, map(_row, cards), left=2)
        print("candid models NAME shows a card; candid examine NAME IMAGE judges an image.")


def _show_own(name: str, history: bool, as_json: bool) -> None:
    """Show the card of a model that was trained or changed here."""
    from candid.judging.by_class import ByClass
    from candid.models import checkpoint
    from candid.training.changes import changes_of

    model = checkpoint.load(name)
    changes, stored = changes_of(model), model.metadata.get("by_class")
    if stored is not None and [row["name"] for row in stored["classes"]] != list(model.class_names):
        stored = None  # it was taught classes since
    card = {"name": name, "kind": model.kind, "classes": list(model.class_names), "changes": changes}
    if as_json:
        print(json.dumps(card | ({} if stored is None else {"by_class": stored})))
        return
    if not history:
        print(printable(f"{name}: a model of the kind '{model.kind}', {len(model.class_names)} classes"))
        if stored is not None:
            table = ByClass.from_dict(stored)
            show_table(*table.for_terminal("Results by class on photos that it had not seen"), tight=True)
            for sentence in table.sentences():
                print(printable(sentence))
    for change in changes:
        print(printable(f"{change['when']}  {change['text']}"))
    if not changes:
        print("no changes since the training")


def _row(card: dict[str, Any]) -> tuple[str, ...]:
    metrics = card["figures"]
    bits = metrics.get("bits_per_dim")
    return (
        card["name"],
        card["images"].replace(" x ", "×"),
        str(len(card["classes"])),
        "–" if card["beta"] is None else number(float(card["beta"])),
        METRICS["accuracy"].shown(metrics["accuracy"]) if metrics else "",
        "–" if bits is None else f"{bits:.3f}",
        f"{card['bytes'] / 1e6:.1f}",
    )


@command
def eyes(
    name: Annotated[
        str | None, Option("Open this eye; download it if it is on the Hugging Face Hub.", default="all eyes")
    ] = None,
    /,
    as_json: JsonFlag = False,
) -> None:
    """List the eyes that photo models look through, or open one; train takes the name as --eye."""
    from candid.models.photo.eyes import ELSEWHERE, EYES

    columns = ("name", "size", "MB", "licence", "speed", "install")
    if name is None:
        rows = [
            (e.name, e.size, e.megabytes, e.licence, e.speed, f"candid-vision{e.extra}")
            for e in EYES.values()
        ]
        rows += [*ELSEWHERE]
        if as_json:
            print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
            return
        texts = [(*map(str, row[:-1]), row[-1].removeprefix("candid-vision") or "candid") for row in rows]
        head = ("name", "px", "MB", "licence", "speed", "from")
        show_table(
            "Eyes: pretrained networks that photo models look through", head, texts, left=6, tight=True
        )
        print("[eyes] and [hub] are extras: pip install 'candid-vision[hub]'; timm is a package of its own.")
        print("Or name a file (.onnx, .pt2), timm:NAME or hf:OWNER/NAME; candid eyes NAME opens one.")
        return
    from candid.models.photo.opening import open_eye

    eye = open_eye(name)
    fields = ("name", "size", "licence", "source", "sha256")
    description = {field: getattr(eye, field) for field in fields} | {"numbers": eye.dimensions}
    if as_json:
        print(json.dumps(description))
        return
    for label, value in [*_eye_rows(description), ("statistics of a photo", f"{eye.dimensions:,}")]:
        print(printable(f"  {label + ':':<32}{value}"))


@command
def info(
    target: Annotated[str, Option("A preset, a bundled model, a model folder or a run folder.")],
    /,
    classes: Annotated[int | None, Option("Number of classes, for a preset.")] = None,
    mixing: Annotated[
        Literal["orthogonal", "permutation"] | None, Option("How channels are mixed, for a preset.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show parameters, cost and sizes of a model, stage by stage, next to a ResNet of the same layout."""
    from candid.models.info import describe

    if classes is None and mixing is None and is_model(target):
        photo = _photo(target)
        if photo is not None:
            print(json.dumps(photo)) if as_json else _show_photo(target, photo)
            return
    description = describe(_config(target, classes=classes, mixing=mixing))
    if as_json:
        print(json.dumps(description))
    else:
        _show(target, description)


def _photo(target: str) -> dict[str, Any] | None:
    """Return the description of a model with an eye, or of stored features; None of other models."""
    from candid.models import checkpoint
    from candid.models.info import describe_head

    return describe_head(checkpoint.load(target), checkpoint.model_folder(target))


def _show_photo(name: str, description: dict[str, Any]) -> None:
    rows = [
        *_eye_rows(description["eye"]),
        ("statistics of a photo", f"{description['statistics']:,}"),
        ("classes", f"{description['classes']:,}"),
        ("posterior", description["posterior"]),
        ("known photos", f"{description['known_photos']:,}"),
        *((f"{part} on disk", f"{size:.2f} MB") for part, size in description["megabytes"].items()),
    ]
    print(f"{name}: a model of the kind '{description['kind']}'")
    for label, value in rows:
        print(f"  {label + ':':<32}{value}")


def _eye_rows(eye: dict[str, Any] | None) -> list[tuple[str, str]]:
    if eye is None:
        return [("eye", "none: it takes stored features, and no photos")]
    return [
        ("eye", f"{eye['name']}, {eye['size']} x {eye['size']} pixels"),
        ("its licence and source", f"{eye['licence']}, {eye['source']}"),
        ("its SHA-256", eye["sha256"][:16] + " …"),
    ]


def _config(target: str, **changes: Any) -> Any:
    from candid.models.checkpoint import load_config
    from candid.models.flow.config import PRESETS, preset

    changes = {key: value for key, value in changes.items() if value is not None}
    if target in PRESETS:
        return preset(target, **changes)
    if not Path(target).exists() and not is_model(target):
        known = [*PRESETS, *zoo.names()]
        raise CandidError(f"There is no preset or model '{target}': {did_you_mean(target, known)}")
    if changes:
        raise CandidError(
            f"'{target}' is a finished model: {' and '.join(changes)} can only change a preset."
        )
    return load_config(target)


def _show(name: str, description: dict[str, Any]) -> None:
    resnet = description["resnet"]
    keys = {
        "network_parameters": "network parameters",
        "total_parameters": "all parameters (with means / linear layer)",
        "gmacs": "10⁹ multiply-accumulates per image",
    }
    counts = [
        (
            label,
            *(f"{each[key]:.4g}" if key == "gmacs" else f"{each[key]:,}" for each in (description, resnet)),
        )
        for key, label in keys.items()
    ]
    show_table(f"{name}: size and cost", ("", "generative", "ResNet"), counts)
    stages = []
    for ours, theirs in zip(description["stages"], resnet["stages"], strict=True):
        fields = [each["receptive_field"] for each in (ours, theirs)]
        stages.append(
            (
                _joined(ours["layer"], theirs["layer"]),
                str(ours["blocks"] or ""),
                " x ".join(map(str, ours["size"])),
                f"{ours['channels']:,} / {theirs['channels']:,}",
                " / ".join("∞" if field is None else str(field) for field in fields),
            )
        )
    columns = ("layer", "blocks", "image size", "channels", "receptive field")
    show_table(f"{name}: by stage, generative / ResNet", columns, stages)


def _joined(ours: str, theirs: str) -> str:
    """``"Haar pooling", "max pooling"`` to ``"Haar / max pooling"``."""
    if ours == theirs:
        return ours
    return f"{ours.removesuffix(' pooling') if theirs.endswith(' pooling') else ours} / {theirs}"


@command
def import_model(
    file: Annotated[
        Path,
        Option(
            "A checkpoint that the paper's authors released, such as beta_1.avg.pt, or torchvision's weights "
            "of a ResNet-50, 101 or 152, such as resnet50-0676ba61.pth."
        ),
    ],
    /,
    out: Annotated[Path, Option("The folder to write the model to.", metavar="DIR")],
    class_names: Annotated[
        Path | None, Option("A text file with one class name on each line.", metavar="FILE")
    ] = None,
) -> None:
    """Import weights for ImageNet: a checkpoint of the paper's authors, or a ResNet of torchvision."""
    if out.is_file():
        raise CandidError(f"'{out}' is a file: name a folder to write the model to.")
    names = None
    if class_names is not None:
        try:
            names = class_names.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise CandidError(f"'{class_names}' is not a UTF-8 text file: {error}.") from error

    from candid.models.importers import import_any
    from candid.models.saving import save

    model = import_any(file, names)
    save(model, out)
    channels, height, width = model.image_shape
    print(printable(f"{out}: {len(model.class_names)} classes, {channels} x {height} x {width} images"))
