"""What engines call: an examiner that is sent to other processes, columns of images in, tables out."""

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

import candid
from candid import CandidError
from candid._support.numbers import Array
from candid._support.options import build
from candid.judging import examine
from candid.models.protocol import Outputs
from candid.trust.promises import ExamineOptions
from tests.photo_models import PhotoRun, photo


def _in_a_second_process(sent: bytes, images: list[Any]) -> tuple[dict[str, list[Any]], bool, int]:
    examiner, again = pickle.loads(sent), pickle.loads(sent)
    return dict(examiner.table(images)), examiner is again, examine._opened.cache_info().misses


def test_an_examiner_is_sent_to_a_second_process_which_opens_its_model_once(photo_run: PhotoRun) -> None:
    options = build(ExamineOptions, {"novelty": 0.1, "confidence": 0.9})
    examiner = candid.Examiner(photo_run.model, options=options)
    images = [
        path.read_bytes() for path in (*photo_run.photos, *sorted(photo_run.strange.rglob("*.png"))[:3])
    ]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        sent = pool.submit(_in_a_second_process, pickle.dumps(examiner), images)
        columns, is_one, opened = sent.result(timeout=300)
    assert is_one and opened == 1
    assert columns == dict(examiner.table(images))
    assert "novel" in columns["verdict"] and None not in columns["verdict"]


def test_a_column_gives_the_verdicts_of_its_files_whatever_it_holds(photo_run: PhotoRun) -> None:
    paths = photo_run.photos
    examiner = candid.Examiner(photo_run.model)
    expected = candid.table(candid.examine(photo_run.model, [*paths]))
    contents = [path.read_bytes() for path in paths]
    columns: dict[str, Any] = {
        "bytes": contents,
        "objects": np.array(contents, object),
        "names": [str(path) for path in paths],
        "records": [{"bytes": content, "path": None} for content in contents],
        "arrays": [np.asarray(Image.open(path)) for path in paths],
        "PIL images": [Image.open(path) for path in paths],
    }
    for kind, column in columns.items():
        table = examiner.table(column)
        assert all(table[name] == expected[name] for name in expected if name != "path"), kind
    assert examiner.table(contents)["path"] == ["0", "1", "2"]
    assert examiner.table(contents, names=["a", "b", "c"])["path"] == ["a", "b", "c"]
    assert examiner.table(columns["names"])["path"] == columns["names"]
    (alone,) = candid.examine(photo_run.model, contents[0])
    assert alone.verdict == expected["verdict"][0]


def _blas_threads() -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def test_small_products_use_one_thread_while_images_are_judged(photo_run: PhotoRun) -> None:
    seen = []

    def watched(images: Array, outputs: Outputs) -> Array:
        seen.append(_blas_threads())
        return np.zeros(len(images))

    examiner = candid.Examiner(photo_run.model)
    examiner.measures = {"watched": watched}
    with threadpool_limits(2, "blas"):
        assert examiner.table([str(photo_run.photos[0])])["error"] == [None]
        assert seen == [{1}] and _blas_threads() == {2}


def test_what_is_no_image_is_a_row(photo_run: PhotoRun) -> None:
    cut = photo_run.photos[0].read_bytes()[:900]
    lazy = Image.open(BytesIO(_cut_png()))
    wrong = [
        cut,
        b"",
        None,
        7,
        "missing.png",
        "a\0b",
        np.zeros(3, np.uint8),
        np.uint8(3),
        {"bytes": None},
        lazy,
    ]
    images = [item for image in wrong for item in (image, photo_run.photos[0])]
    table = candid.Examiner(photo_run.model).table(images)
    assert len(table["path"]) == len(images)
    assert all(error for error in table["error"][::2]) and not any(table["verdict"][::2])
    assert not any(table["error"][1::2]) and len(set(table["p_value"][1::2])) == 1


def _cut_png() -> bytes:
    whole = BytesIO()
    photo("dots", 3).save(whole, "PNG")
    return whole.getvalue()[:5000]


def test_an_open_model_can_not_be_sent(photo_run: PhotoRun) -> None:
    examiner = candid.Examiner(candid.load(photo_run.model))
    with pytest.raises(CandidError, match="goes to other processes by the name of its model"):
        pickle.dumps(examiner)
