import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import candid
from candid.data.images import Preprocessing, decode_as, to_float
from candid.data.thumbnails import SIDE, whole_photo
from candid.explanations.explainer import nearest_photos
from candid.models.photo import known_photos
from candid.models.photo.known_photos import KnownPhotos
from candid.reports.plots.examine import _draw_nearest
from candid.reports.plots.latent import known_photos as figure_of_known
from tests.helpers import candid_command
from tests.photo_models import CLASSES, PhotoRun, train_photo_model, write_photos


def test_the_nearest_known_photos_are_mostly_of_the_class(photo_run: PhotoRun) -> None:
    model = candid.load(photo_run.model)
    known = model.known_photos
    assert known is not None and np.bincount(known.labels).tolist() == [12, 12, 12]
    for y, path in enumerate(photo_run.photos):
        image = to_float(decode_as(path, model.preprocessing)[None])
        place = model.places(model.outputs(image).latent)[0]
        order = known.nearest(place, 5)
        distances = np.linalg.norm(known.places - place, axis=1)
        assert distances[order].tolist() == sorted(distances.tolist())[:5]
        assert (known.labels[order] == y).sum() >= 3
        other = (y + 1) % 3
        assert set(known.labels[known.nearest(place, 3, other)].tolist()) == {other}


def test_thumbnails_are_the_photos_and_stay_with_the_model(photo_run: PhotoRun, tmp_path: Path) -> None:
    model = candid.load(photo_run.model)
    again = candid.load(candid.save(model, tmp_path / "copy"))
    known = again.known_photos
    originals = np.stack(
        [
            decode_as(path, Preprocessing(3, SIDE, SIDE)).astype(np.float64)
            for path in sorted(Path(photo_run.data, "train", "dots").glob("*.png"))
        ]
    )
    first = known.picture(known.labels.tolist().index(0))
    assert np.abs(originals - first).mean((1, 2, 3)).min() < 20  # JPEG is lossy
    size = sum(file.stat().st_size for file in (tmp_path / "copy").glob("thumbnails-*"))
    assert 0 < size < 1_000_000 and model.fingerprint() == again.fingerprint()


def test_thumbnails_never_take_more_than_their_room(
    photo_run: PhotoRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted(Path(photo_run.data, "train").rglob("*.png"))
    labels = np.array([CLASSES.index(path.parent.name) for path in paths])
    places = np.zeros((len(paths), 2), np.float32)
    monkeypatch.setattr(known_photos, "MOST_BYTES", 40_000)
    few = KnownPhotos.of(paths, labels, places, 3)
    assert few is not None and len(few.jpeg) <= 40_000
    counts = np.bincount(few.labels)
    assert counts.min() == counts.max() < 12
    monkeypatch.setattr(known_photos, "MOST_BYTES", 100)
    assert KnownPhotos.of(paths, labels, places, 3) is None


def test_a_page_without_a_counterfactual_shows_photos_instead(photo_run: PhotoRun, tmp_path: Path) -> None:
    done = candid_command(
        *("examine", photo_run.model, photo_run.photos[0], "--figures", tmp_path, "--json"),
        *("--towards", "rings", "--against", "stripes"),
    )
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["could_be_instead"] == "stripes"
    assert len(found["nearest_known_photos"]) == 5
    assert "no inverse to pixels" in found["counterfactual"]["error"]
    assert "nearest known photos are shown instead" in found["counterfactual"]["error"]
    with Image.open(found["page"]) as page:
        assert page.size[0] > 800


def test_the_page_says_which_classes_have_no_photos(photo_run: PhotoRun, tmp_path: Path) -> None:
    """A taught class has none."""
    write_photos(tmp_path, ("checks",), 5, start=50)
    model = candid.teach(photo_run.model, {"checks": tmp_path / "checks"}).model
    image = to_float(decode_as(photo_run.photos[0], model.preprocessing)[None])
    latent = model.outputs(image).latent
    assert latent is not None
    found = nearest_photos(model, latent, 3)
    assert found is not None and (found.of_instead, found.missing) == ((), (3,))
    page = Figure()
    _draw_nearest(page, found, model.class_names)
    said = [each.get_text() for each in page.findobj(Text)]
    assert "no photos of checks are kept with this model" in said
    before = nearest_photos(candid.load(photo_run.model), latent, 1)
    assert before is not None and before.missing == ()
    row = figure_of_known({3: []}, model.class_names)
    assert "no photos are kept of checks" in [each.get_text() for each in row.findobj(Text)]


def test_thumbnails_can_be_left_out(tmp_path: Path) -> None:
    run = train_photo_model(tmp_path, photos=8, thumbnails=False)
    assert candid.load(run.model).known_photos is None
    assert not [*Path(run.model).rglob("thumbnails-*")]
    done = candid_command(
        *(
            "examine",
            run.model,
            run.photos[0],
            "--figures",
            tmp_path / "pages",
            "--towards",
            "rings",
            "--json",
        )
    )
    assert "--no-thumbnails" in json.loads(done.stdout)["counterfactual"]["error"]


def test_a_whole_photo_is_upright_and_not_cropped(tmp_path: Path) -> None:
    image = Image.new("RGB", (1200, 300), "white")
    image.paste("red", (0, 0, 600, 300))
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was turned: the left is above
    image.save(tmp_path / "lying.jpg", exif=exif)
    found = whole_photo(tmp_path / "lying.jpg", 400)
    assert found is not None and found.shape == (3, 400, 100)
    assert found[1, :150].mean() < 30 and found[1, 250:].mean() > 225
    assert whole_photo(tmp_path / "missing.jpg") is None
