"""Verdicts of exported photo models without Candid, compared with Candid's, on photos in folders.

python -m experiments.exported waste=trashnet6 clothing=clothing10 --photos 200
"""

import argparse
import runpy
import tempfile
from collections import Counter
from pathlib import Path

import onnxruntime

import candid
from candid.cli.app import run as run_command
from candid.data.formats import images_in

SCRIPT = Path(__file__).parents[1] / "examples/deploy/verdict.py"


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL=PHOTOS")
    parser.add_argument("--photos", type=int, default=200)
    arguments = parser.parse_args()
    script = runpy.run_path(str(SCRIPT))
    for model, _, folder in (each.partition("=") for each in arguments.models):
        files = images_in(Path(folder))
        paths = files[:: max(1, len(files) // arguments.photos)][: arguments.photos]
        with tempfile.TemporaryDirectory() as place:
            network = Path(place) / "model.onnx"
            run_command(["export", model, "--out", str(network), "--json"])
            session, verdicts = (
                onnxruntime.InferenceSession(str(network)),
                script["Verdicts"](network.with_suffix(".json")),
            )
            size, margin = session.get_inputs()[0].shape[-1], verdicts.known["margin"]
            different, furthest, kinds = [], 0.0, Counter[str]()
            for path, expected in zip(paths, candid.examine(model, paths), strict=True):
                image = script["seen"](path, size, margin)
                logits, novelty = session.run(["logits", "novelty"], {"images": image[None]})
                verdict, classes, kind, _, p = verdicts.verdict(logits[0], novelty[0])
                answer = (expected.verdict, list(expected.classes or ()), expected.node)
                different += [path] if (verdict, classes, kind) != answer else []
                furthest = max(furthest, abs(p - (expected.p_value or 0.0)))
                kinds[verdict] += 1
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        print(
            f"{model}: {len(paths)} photos ({counts}), {len(different)} answers differ, p by {furthest:.1e}"
        )
        for path in different:
            print(f"  {path}")


if __name__ == "__main__":
    main()
