"""A head after photos were added, classes merged or removed, next to heads that were fitted to all photos."""

from dataclasses import replace

import numpy as np
import pytest

from candid._support.numbers import Array
from candid.models.photo.gaussian import Totals
from candid.models.photo.head import Posterior, fit_head, out_of_fold_z
from candid.models.photo.model import PhotoModel
from candid.models.photo.revised import Photos, revised, totals_of
from candid.models.photo.taught import Seen
from tests.models.photo.test_taught import GROUPS, POSTERIORS, NoEye, points

NAMES = ("a", "b", "c", "d")


def fitted(x: Array, y: Array, posterior: Posterior) -> tuple[PhotoModel, Seen]:
    head = fit_head(x, y, len(NAMES), GROUPS, logistic=False)
    if posterior == "logistic":
        weight = np.random.default_rng(0).normal(size=(len(NAMES), x.shape[1]))
        head = replace(head, logistic=(weight, np.zeros(len(NAMES))))
    model = PhotoModel.of(replace(head, posterior=posterior), NoEye(), NAMES)
    model.metadata = {"head": {**head.described(), "photos": len(x)}}
    fold = head.out_of_fold
    return model, Seen(out_of_fold_z(head, x), fold.scores, fold.logits, fold.novelty, None)


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_no_change_leaves_the_logits(posterior: Posterior) -> None:
    x, y = points(0, 60)
    model, seen = fitted(x, y, posterior)
    same = revised(model, range(4), NAMES, seen, y).model
    if posterior == "logistic":  # it has no closed form: the better of the others takes its place
        assert same.config.posterior in ("mixture", "second-stage")
        return
    np.testing.assert_allclose(same.logits_of(x), model.logits_of(x), atol=2e-2)
    assert same.config.posterior == posterior


@pytest.mark.parametrize("posterior", ["mixture", "second-stage"])
def test_added_photos_give_the_head_of_all_photos(posterior: Posterior) -> None:
    """A class with few photos that gets more is recognised as by a head that was fitted to all of them."""
    x, y = points(0, 60)
    few = (y != 1) | (np.cumsum(y == 1) <= 8)
    model, seen = fitted(x[few], y[few], posterior)
    whole, _ = fitted(x, y, posterior)
    result = revised(model, range(4), NAMES, seen, y[few], Photos(x[~few], y[~few]))
    totals = totals_of(result.model)
    assert totals.counts.tolist() == [60] * 4
    expected = Totals.of(x, y, 4)
    assert np.linalg.norm(totals.products - expected.products) < 0.01 * np.linalg.norm(expected.products)
    test, _ = points(5, 50)
    before, after, right = (each.logits_of(test).argmax(1) for each in (model, result.model, whole))
    assert (after == right).mean() >= 0.98 and (after == right).sum() >= (before == right).sum()
    assert result.new is not None and (result.new.logits.argmax(1) == 1).mean() > 0.8
    assert result.known.scores.shape == (few.sum(), 4)


def test_a_photo_that_was_left_out_stays_left_out() -> None:
    """Remembered photos of the class lose nothing: their scores are still those of heads without them."""
    x, y = points(0, 60)
    few = (y != 1) | (np.cumsum(y == 1) <= 8)
    model, seen = fitted(x[few], y[few], "mixture")
    result = revised(model, range(4), NAMES, seen, y[few], Photos(x[~few], y[~few]))
    own = y[few] == 1
    before, after = ((each.logits.argmax(1) == 1)[own].mean() for each in (seen, result.known))
    assert after >= before


def test_merged_and_removed_classes() -> None:
    x, y = points(0, 60)
    model, seen = fitted(x, y, "mixture")
    merged = revised(model, (0, 0, 1, 2), ("ab", "c", "d"), seen, np.array([0, 0, 1, 2])[y])
    assert totals_of(merged.model).counts.tolist() == [120, 60, 60]
    labels = np.array([0, 0, 1, 2])[points(5, 50)[1]]
    assert (merged.model.logits_of(points(5, 50)[0]).argmax(1) == labels).mean() > 0.85
    rows = y != 1
    kept = Seen(*(None if part is None else part[rows] for part in seen))  # type: ignore[arg-type]
    groups = np.array([0, -1, 1, 2])
    less = revised(model, groups.tolist(), ("a", "c", "d"), kept, groups[y[rows]])
    assert totals_of(less.model).counts.tolist() == [60] * 3
    test, truth = points(5, 50)
    known = truth != 1
    found = less.model.logits_of(test[known]).argmax(1)
    assert (found == groups[truth[known]]).mean() > 0.9
