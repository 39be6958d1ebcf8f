"""The command that adopts a classifier."""

from pathlib import Path
from typing import Annotated

from candid._support.errors import CandidError
from candid._support.options import Option
from candid._support.progress import TerminalProgress, is_first_process
from candid._support.text import printable
from candid.cli.app import command
from candid.models.photo.eyes import EYES
from candid.training.options import AdoptOptions


@command
def adopt(
    classifier: Annotated[
        str,
        Option(
            f"A pretrained classifier of ImageNet ({', '.join(EYES)}), a ResNet of candid, an ONNX or "
            ".pt2 file with logits, or hf:OWNER/NAME with such a file.",
            metavar="EYE",
        ),
    ],
    images: Annotated[str, Option("Images like those that it will see, with labels or without.")],
    /,
    out: Annotated[Path, Option("The folder to write the model to.", metavar="DIR")],
    options: AdoptOptions,
) -> None:
    """Turn a softmax classifier into a generative one with the same posteriors, and with verdicts.

    A density is fitted to the features of one half of the images; the other half is held out for verdicts.
    Class sets need labels: folders with the names of the classes, or ImageNet's WordNet numbers (n02123159).
    """
    if out.is_file():
        raise CandidError(f"'{out}' is a file: name a folder to write the model to.")

    from dataclasses import asdict

    from candid.judging.held_out import HeldOut
    from candid.training.adopt import adopt as run
    from candid.trust.ranking import ALL

    model = run(classifier, images, out=out, progress=TerminalProgress(), **asdict(options))
    if not is_first_process():
        return
    counts = model.metadata["adopted"]
    print(
        printable(
            f"{out}: {len(model.class_names):,} classes with the posteriors of '{classifier}'; a density "
            f"of {model.feature_size:,} features, fitted to {counts['images']:,} images; "
            f"{counts['held_out']:,} held out"
        )
    )
    held_out = HeldOut.of(model)
    if held_out is not None:
        for sentence in held_out.rule().promises[ALL].sentences():
            print(sentence)
