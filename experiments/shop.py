"""A shop's year: an uneven folder of photos, its weakest class, more photos of it by teaching and by training.

``python -m experiments.shop PHOTOS CLASS`` takes a folder with a folder for each class. A quarter of each is for testing.
CLASS keeps 25 photos, the others 200 at most. A copy, a wrong label, transparent PNGs, a HEIC and a broken file are
added. It prints the recall of CLASS and the accuracy on the test photos, and CPU seconds:
of docs/photos.md with trashnet6 and glass. ``--exact`` compares teaching with a training on all photos instead.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

import candid
from candid.data.images import decode_as
from candid.models.photo.model import PhotoModel

FEW, MANY, MORE, AGAIN = 25, 200, 30, 20
"""Photos of the weak class, of the others at most, that are taught, and that are added to the folder."""
HEIC = Path(__file__).parent.parent / "tests" / "data" / "turned.heic"
T = TypeVar("T")


def make(photos: Path, weak: str, out: Path) -> tuple[Path, Path, Path, list[Path]]:
    """Copy photos; return the folders of the shop, for testing and to teach, and photos that come later."""
    order = random.Random(0)
    shop, test, more = out / "shop", out / "test", out / "more"
    later: list[Path] = []
    for folder in sorted(path for path in photos.iterdir() if path.is_dir()):
        files = sorted(folder.iterdir())
        order.shuffle(files)
        quarter = len(files) // 4
        count = FEW if folder.name == weak else MANY
        copy(files[:quarter], test / folder.name)
        copy(files[quarter : quarter + count], shop / folder.name)
        if folder.name == weak:
            copy(files[quarter + count : quarter + count + MORE], more)
            later = files[quarter + count + MORE : quarter + count + MORE + AGAIN]
    return shop, test, more, later


def copy(files: list[Path], folder: Path) -> None:
    """Copy files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, folder / file.name)


def spoil(shop: Path, weak: str) -> None:
    """Add what real folders have: a copy, a wrong label, transparent PNGs, a HEIC, a broken file."""
    first, second = [name for name in sorted(path.name for path in shop.iterdir()) if name != weak][:2]
    known = sorted((shop / weak).iterdir())
    shutil.copy(known[0], shop / weak / f"copy of {known[0].name}")
    files = sorted((shop / first).iterdir())
    files[0].rename(shop / second / f"wrong {files[0].name}")
    for path in files[1:4]:
        image = Image.open(path).convert("RGBA")
        image.putalpha(Image.fromarray((np.indices(image.size[::-1]).sum(0) % 256).astype(np.uint8)))
        image.save(path.with_suffix(".png"))
        path.unlink()
    shutil.copy(HEIC, shop / first / "phone.heic")
    (shop / second / "broken.jpg").write_bytes(files[6].read_bytes()[:200])


def timed(what: str, run: Callable[[], T]) -> T:
    """Run something and print its CPU seconds."""
    start = time.process_time()
    result = run()
    print(f"{what}: {time.process_time() - start:.1f} CPU seconds", flush=True)
    return result


def show(what: str, model: object, test: Path, weak: str) -> None:
    """Print the recall of the weak class and the accuracy on test photos."""
    found = candid.evaluate(model, str(test), part="all", workers=0)
    assert found is not None
    row = next(row for row in found.metrics["by_class"]["classes"] if row["name"] == weak)
    print(f"{what}: {weak} {row['right']} of {row['images']}, all {100 * found.metrics['accuracy']:.1f} %")


def story(photos: Path, weak: str, out: Path) -> None:
    """Print the whole story."""
    shop, test, more, later = make(photos, weak, out)
    spoil(shop, weak)
    mine = str(out / "mine")
    results = timed("training", lambda: candid.train(str(shop), out=mine)).results
    print(*results["by_class"]["sentences"], results["series"], sep="\n")
    show("as it is", mine, test, weak)
    taught = timed(f"teaching {MORE}", lambda: candid.teach(mine, {weak: more}))
    print(*taught.sentences(), sep="\n")
    show(f"{MORE} more taught", taught.model, test, weak)
    copy(later, shop / weak)
    again = timed(f"training again with {AGAIN}", lambda: candid.train(str(shop), out=mine)).results
    print(f"extracted {again['extracted']}")
    show(f"{AGAIN} more trained", mine, test, weak)
    for path in later:
        (shop / weak / path.name).unlink()
    copy(list(more.iterdir()), shop / weak)
    together = candid.train(str(shop), out=out / "both").best
    show(f"the {MORE} trained", together, test, weak)


def exact(photos: Path, weak: str, out: Path) -> None:
    """Print how often a taught model and one that was trained on all photos say the same."""
    shop, test, more, _ = make(photos, weak, out)
    for kind in shop.iterdir():  # all photos are fitted to; the part to test is not used
        shutil.copytree(kind, out / "before" / "train" / kind.name)
    shutil.copytree(test, out / "before" / "test")
    shutil.copytree(out / "before", out / "after")
    copy(list(more.iterdir()), out / "after" / "train" / weak)
    models = [
        candid.load(candid.train(str(out / part), out=out / f"run-{part}").best)
        for part in ("before", "after")
    ]
    taught = candid.teach(models[0], {weak: more}).model
    predicted = {
        name: answers(model, test)
        for name, model in (("before", models[0]), ("taught", taught), ("trained", models[1]))
    }
    names = [path.parent.name for path in sorted(test.rglob("*")) if path.is_file()]
    own = np.array(names) == weak
    for name, found in predicted.items():
        print(
            f"{name}: recall of {weak} {100 * (found[own] == weak).mean():.0f} %, accuracy {100 * (found == names).mean():.1f} %"
        )
    print(
        f"taught and trained agree on {100 * (predicted['taught'] == predicted['trained']).mean():.1f} % of {len(names)}"
    )
    print("posteriors:", *(model.posterior_name for model in models))


def answers(model: PhotoModel, test: Path) -> np.ndarray:
    """Return the most probable class of each test photo."""
    paths = [path for path in sorted(test.rglob("*")) if path.is_file()]
    logits = [
        model.logits(decode_as(path, model.preprocessing)[None].astype(np.float32) / 255)[0] for path in paths
    ]
    return np.array(model.class_names)[np.argmax(logits, 1)]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("weak")
    parser.add_argument("--exact", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (exact if chosen.exact else story)(chosen.photos, chosen.weak, Path(folder))


if __name__ == "__main__":
    main()
