"""Evaluations and audits of stored arrays, through the command line: what is found, written and refused."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

import candid
from candid import CandidError, Monitor
from candid.evaluation.compare import group_table
from candid.evaluation.evaluate import evaluate
from tests.helpers import candid_command

Arrays = dict[str, Any]


def arrays(n: int, seed: int, shift: float = 0.0) -> Arrays:
    """Return what a classifier of three classes says of n images."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    features = random.normal(size=(n, 6)) + shift
    features[np.arange(n), labels] += 3.5
    return {"logits": 1.5 * features[:, :3], "labels": labels, "features": features}


def store(folder: Path, **files: Arrays) -> None:
    for name, each in files.items():
        np.savez(folder / f"{name}.npz", **each)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with held-out images, test images and others."""
    names, sites = np.array(["ant", "bee", "cow"]), np.array(["north", "south", "west"])
    held_out, test = arrays(600, 0), arrays(300, 1)
    where = [
        np.where(np.arange(len(each["labels"])) % 40 == 0, 2, each["labels"] % 2) for each in (held_out, test)
    ]
    store(
        tmp_path,
        val=held_out | {"class_names": names, "site": sites[where[0]]},
        test=test | {"site": sites[where[1]], "paths": np.array([f"new/{i}.png" for i in range(300)])},
        far={key: value for key, value in arrays(50, 2, shift=-7).items() if key != "labels"},
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


STORED = ("--held-out", "val.npz", "--test", "test.npz")


def metrics_of(**options: Any) -> dict[str, Any]:
    found = evaluate(held_out=Path("val.npz"), test=Path("test.npz"), **options)
    assert found is not None
    return found.metrics


def test_arrays_are_judged_as_a_monitor_judges_them(folder: Path) -> None:
    run = candid_command(
        "evaluate", *STORED, "--ood", "far=far.npz", "--temperature", "--name", "mine", "--json"
    )
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    held_out, test = (dict(np.load(f"{name}.npz")) for name in ("val", "test"))
    monitor = Monitor().fit(
        held_out["logits"], held_out["labels"], held_out["features"], ["ant", "bee", "cow"]
    )
    examined = monitor.examine(test["logits"], test["features"])
    right = test["logits"].argmax(1) == test["labels"]
    accepted = np.array([each.verdict == "accept" for each in examined])
    assert (found["model"], found["kind"], found["images"]) == ("mine", "stored arrays", 300)
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["verdicts"]["sets"]["test"]["accept"] == pytest.approx(accepted.mean())
    assert found["verdicts"]["sets"]["far"]["novel"] == 1 and found["verdicts"]["score"] == "combined"
    assert found["verdicts"]["sentences"] == monitor.sentences()
    own = found["selective"]["verdicts"]
    exact = binomtest(int(right[accepted].sum()), int(accepted.sum())).proportion_ci(method="exact")
    assert own["intervals"]["accepted"] == pytest.approx([exact.low, exact.high])
    assert own["foreign"]["far"] == 0 and found["temperature_scaled"]["temperature"] > 0
    assert {"knn", "vim", "combined"} <= found["ood"]["far"].keys() and "joint" not in found["ood"]["far"]
    with (folder / "evaluation" / "mine" / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 350 and rows[7]["path"] == "new/7.png" and rows[7]["true_label"] == "bee"
    assert [row["verdict"] for row in rows[:300]] == [each.verdict for each in examined]


def test_logits_alone_are_enough(folder: Path) -> None:
    for name in ("val", "test", "far"):
        store(
            folder, **{name: {key: each for key, each in np.load(f"{name}.npz").items() if key != "features"}}
        )
    found = metrics_of(ood={"far": "far.npz"})
    assert found["verdicts"]["n_reference"] == 600
    assert set(found["false_positives"]) == {"max-posterior", "energy", "max-logit", "gen", "combined"}


@pytest.mark.parametrize("images", [600, 300])
@pytest.mark.parametrize("options", [{}, {"risk": 0.05}, {"score": "knn"}, {"novelty_promise": "confident"}])
@pytest.mark.parametrize("keys", [("logits", "labels"), ("logits", "labels", "features")])
def test_the_table_of_scores_has_the_score_behind_the_verdicts(
    folder: Path, images: int, options: dict[str, Any], keys: tuple[str, ...]
) -> None:
    """Scores are cross-fitted to 300 images and to one half of 600; a risk takes half of them."""
    if "score" in options and "features" not in keys:
        return
    for name in ("val", "test", "far"):
        stored = {key: values[:images] for key, values in np.load(f"{name}.npz").items() if key in keys}
        store(folder, **{name: stored})
    found = metrics_of(novelty=0.05, ood={"far": "far.npz"}, **options)
    score, sets = found["verdicts"]["score"], found["verdicts"]["sets"]
    level = found["verdicts"]["promises"]["novelty"]["in_force"]
    assert level == 0.05 and score == options.get("score", "combined")
    if "novelty_promise" not in options:  # else the cut lies below the level
        assert found["false_positives"][score]["0.05"] == pytest.approx(sets["test"]["novel"], abs=1e-12)
        assert found["ood"]["far"][score]["detected"] == pytest.approx(sets["far"]["novel"], abs=1e-12)
    assert found["false_positives"][score]["0.05"] >= sets["test"]["novel"]


def test_false_discoveries_are_decided_about_each_set_together(folder: Path) -> None:
    found = evaluate(held_out=Path("val.npz"), test=Path("test.npz"), ood={"far": "far.npz"}, fdr=0.1)
    assert found is not None and found.metrics["verdicts"]["sets"]["far"]["novel"] == 1
    for name in ("test", "far"):
        judged = [each for part, _, each in found.examinations() if part == name]
        p_values = np.array([each.p_value for each in judged])
        novel = np.array([each.verdict == "novel" for each in judged])
        assert np.array_equal(novel, Monitor.select(p_values, fdr=0.1))
        assert found.metrics["verdicts"]["sets"][name]["novel"] == pytest.approx(novel.mean())
    with pytest.raises(CandidError, match="leave one of them out"):
        metrics_of(fdr=0.1, risk=0.1)


def test_the_risk_of_accepted_images_is_promised_or_refused(folder: Path) -> None:
    found = metrics_of(risk=0.05, delta=0.1)
    promised = found["verdicts"]["promises"]["risk"]
    assert (promised["asked"], promised["delta"], promised["images"]) == (0.05, 0.1, 300)
    assert any(each.startswith("Risk 5 %") for each in found["verdicts"]["sentences"])
    refused = candid_command("evaluate", *STORED, "--risk", "0.001")
    assert refused.exit_code == 2 and "A risk of 0.1 % can't be promised with 600 held-out images" in str(
        refused.exception
    )


@pytest.mark.parametrize("by", ["site", "photos.csv:site"])
def test_levels_hold_within_groups_of_a_key_or_a_table(folder: Path, by: str) -> None:
    if by != "site":
        lines = ["path,site"]
        for name in ("val", "test"):
            each = dict(np.load(f"{name}.npz"))
            paths = [f"{name}/{i}.png" for i in range(len(each["labels"]))]
            lines += [f"{path},{site}" for path, site in zip(paths, each.pop("site"), strict=True)]
            store(folder, **{name: each | {"paths": np.array([f"/photos/{path}" for path in paths])}})
        (folder / "photos.csv").write_text("\n".join(lines))
    found = metrics_of(by=by, novelty=0.05, ood={"far": "far.npz"})
    groups = found["groups"]["groups"]
    assert set(groups) == {"north", "south", "west"} and found["groups"]["by"] == by
    assert groups["north"]["own_levels"] and groups["north"]["n_reference"] > 190
    assert not groups["west"]["own_levels"] and groups["west"]["n_reference"] == 10
    assert any(each.startswith("Group 'west' has") for each in found["verdicts"]["sentences"])
    assert sum(each["images"] for each in groups.values()) == 300
    head, rows = group_table(found["groups"])
    assert head[2] == "ranked among" and rows[2][2] == "10 of small groups"


@pytest.mark.parametrize("together", ["day", "days.csv:day"])
def test_series_of_a_key_or_a_table_count_once(folder: Path, together: str) -> None:
    held_out = dict(np.load("val.npz"))
    days = np.arange(600) // 3
    store(folder, val=held_out | {"day": days})
    if together != "day":
        store(folder, val=held_out | {"paths": np.array([f"{i}.png" for i in range(600)])})
        (folder / "days.csv").write_text(
            "path,day\n" + "".join(f"{i}.png,{day}\n" for i, day in enumerate(days))
        )
    found = metrics_of(together=together)["verdicts"]
    assert any(each.startswith("400 of the held-out images are copies") for each in found["sentences"])
    monitor = Monitor().fit(held_out["logits"], held_out["labels"], held_out["features"], together=days)
    assert found["sentences"] == monitor.sentences()


def test_levels_hold_within_predicted_classes(folder: Path) -> None:
    found = metrics_of(by="class", novelty=0.05)
    assert {name: each["own_levels"] for name, each in found["groups"]["groups"].items()} == {
        "ant": True,
        "bee": True,
        "cow": True,
    }


def test_images_that_are_held_out_check_nothing(folder: Path) -> None:
    held_out, test = (dict(np.load(f"{name}.npz")) for name in ("val", "test"))
    mixed = {
        key: np.concatenate((held_out[key][:100], test[key])) for key in ("logits", "labels", "features")
    }
    store(folder, test=mixed)
    found = metrics_of()
    assert found["held_out_overlap"] == 100 and found["selective"]["images"] == 300


def test_an_audit_of_arrays_is_a_page(folder: Path) -> None:
    run = candid_command("audit", *STORED, "--ood", "far=far.npz", "--by", "site", "--risk", "0.05", "--json")
    assert run.exit_code == 0, run.stderr
    (model,) = json.loads(run.stdout)["models"]
    grades = {each["aspect"]: each["grade"] for each in model["grades"]}
    assert grades["False alarms"] == "good" and grades["Out of distribution"] == "good"
    assert grades["Corruptions"] == grades["Attacks"] == "unknown"
    page = (folder / "audit" / "audit.html").read_text()
    assert "groups by &#39;site&#39;" in page and "Risk 5&nbsp;%" in page and "plain threshold" in page
    assert "candid evaluate --risk 0.05 --held-out val.npz --test test.npz" in page
    assert "Attacks: stored arrays have no network." in page
    assert (folder / "audit" / "evaluation" / "classifier" / "metrics.json").is_file()


def test_a_pickled_file_runs_nothing(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return Path.touch, (Path("ran"),)

    np.savez(folder / "val.npz", logits=np.array([Trap()], dtype=object), labels=[0])
    run = candid_command("evaluate", *STORED)
    assert run.exit_code == 2 and "'logits' in 'val.npz' is pickled, which is never read" in str(
        run.exception
    )
    np.save(folder / "val.npz", np.array([Trap()], dtype=object), allow_pickle=True)
    (folder / "val.npz.npy").replace(folder / "val.npz")
    assert "is no npz file that can be read" in str(candid_command("evaluate", *STORED).exception)
    assert not (folder / "ran").exists()


def without(*keys: str) -> Any:
    return lambda each: {name: value for name, value in each.items() if name not in keys}


def changed(key: str, change: Any) -> Any:
    return lambda each: each | {key: change(each[key])}


def holed(values: Any, hole: float) -> Any:
    values = values.copy()
    values[3, 1] = hole
    return values


def softmax(logits: Any) -> Any:
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


BAD: list[tuple[str, Any, str]] = [
    ("val", without("logits"), "'val.npz' has no key 'logits': write it with np.savez"),
    ("test", without("labels"), "'test.npz' has no key 'labels'"),
    (
        "val",
        changed("logits", lambda v: holed(v, np.nan)),
        "In 'val.npz': The logits of 1 of 600 images are NaN",
    ),
    (
        "test",
        changed("logits", lambda v: holed(v, np.inf)),
        "In 'test.npz': The logits of 1 of 300 images are",
    ),
    (
        "far",
        changed("features", lambda v: holed(v, np.inf)),
        "In 'far.npz': The features of 1 of 50 images are",
    ),
    ("val", changed("logits", softmax), "These are probabilities, not logits"),
    ("val", changed("logits", lambda v: v[:, 0]), r"The logits must have the shape \(images, classes\)"),
    ("val", changed("labels", lambda v: v[:-1]), "one label for each of the 600 images"),
    ("val", changed("labels", lambda v: v + 1), "Labels must lie between 0 and 2"),
    ("test", changed("labels", lambda v: v - 1), "In 'test.npz': Labels must lie between 0 and 2"),
    ("val", changed("labels", lambda v: v % 2), "There is no held-out image of class 'cow'"),
    ("val", changed("labels", lambda v: np.array(["ant"] * len(v))), "Labels must be whole numbers"),
    (
        "test",
        changed("features", lambda v: v[:, :4]),
        "'test.npz' has 4 features per image and 'val.npz' has 6",
    ),
    ("far", without("features"), "'far.npz' has no features and 'val.npz' has 6 features per image"),
    ("val", changed("features", lambda v: v[:10]), "features of 10 images and logits of 600"),
    ("test", changed("logits", lambda v: v[:, :2]), "(?s)In 'test.npz'|'test.npz' has logits of 2 classes"),
    ("far", changed("logits", lambda v: v[:, :2]), "'far.npz' has logits of 2 classes and 'val.npz' of 3"),
    ("test", lambda each: each | {"class_names": np.array(list("abc"))}, "have different class_names"),
    ("val", changed("class_names", lambda v: v[[0, 0, 1]]), "In 'val.npz': "),
    ("val", changed("class_names", lambda v: v[:2]), "In 'val.npz': "),
    ("test", changed("paths", lambda v: v[:5]), "There are 5 paths and logits of 300 images"),
    (
        "val",
        lambda each: {name: value[:12] for name, value in each.items() if name != "class_names"},
        "too few",
    ),
    ("far", lambda each: {name: value[:0] for name, value in each.items()}, "There are no images"),
    ("test", lambda _: dict(np.load("val.npz")), "'test.npz' has the same images as 'val.npz'"),
]


@pytest.mark.parametrize(("name", "change", "said"), BAD, ids=[said[:40] for _, _, said in BAD])
def test_bad_arrays_give_one_sentence(folder: Path, name: str, change: Any, said: str) -> None:
    store(folder, **{name: change(dict(np.load(f"{name}.npz")))})
    with pytest.raises(CandidError, match=said) as refused:
        evaluate(held_out=Path("val.npz"), test=Path("test.npz"), ood={"far": "far.npz"})
    text = str(refused.value)
    assert text.endswith(".") and "\n" not in text and len(text) < 300


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no npz file that can be read"),
        (b"PK\x03\x04 and nothing else", "is cut or damaged|is no npz file"),
        (None, "There is no file 'val.npz'"),
    ],
)
def test_other_files_are_refused(folder: Path, content: bytes | None, said: str) -> None:
    (folder / "val.npz").unlink()
    if content is not None:
        (folder / "val.npz").write_bytes(content)
    with pytest.raises(CandidError, match=said):
        evaluate(held_out=Path("val.npz"), test=Path("test.npz"))


def test_a_cut_file_is_refused(folder: Path) -> None:
    content = (folder / "val.npz").read_bytes()
    (folder / "val.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(CandidError, match=r"'val.npz' is cut or damaged"):
        evaluate(held_out=Path("val.npz"), test=Path("test.npz"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("evaluate", "--held-out", "val.npz"), "add --test"),
        (("audit", "--test", "test.npz"), "add --held-out"),
        (("evaluate", "cifar10-beta1", *STORED), "but not both"),
        (("audit", "cifar10-beta1", *STORED), "Give MODEL and --data DATA, or stored arrays"),
        (("evaluate",), "Give MODEL and DATA, or stored arrays"),
        (("audit",), "Give MODEL and --data DATA, or stored arrays"),
        (("evaluate", *STORED, "--images", "5"), "--images is for images that pass a network"),
        (("audit", *STORED, "--images", "5"), "--images is for images that pass a network"),
        (("evaluate", *STORED, "--together", "labels"), "--together takes a key with names or FILE.csv"),
        (("evaluate", *STORED, "--together", "day"), "'val.npz' has no key 'day'"),
        (("evaluate", *STORED, "--by", "labels"), "--by takes 'class' or a key"),
        (("evaluate", *STORED, "--by", "camera"), "'val.npz' has no key 'camera'"),
        (("evaluate", *STORED, "--by", "photos.csv:site"), "The table 'photos.csv' can't be read"),
        (("evaluate", *STORED, "--ood", "test=far.npz"), "The name 'test' is taken"),
        (("evaluate", *STORED, "--score", "joint"), "There is no score 'joint'"),
        (("evaluate", *STORED, "--ood", "far=nowhere.npz"), "There is no file 'nowhere.npz'"),
    ],
)
def test_bad_options_give_one_sentence(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    run = candid_command(*arguments)
    assert run.exit_code == 2 and said in str(run.exception)


def test_a_monitor_of_the_arrays_can_be_kept(folder: Path) -> None:
    """The same files serve from Python."""
    found = candid.evaluate(held_out=folder / "val.npz", test=folder / "test.npz")
    assert found is not None and found.model is None and len(found.predictions) == 300
