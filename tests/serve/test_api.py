"""The API says what the library says."""

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from candid import GenerativeClassifier, ResNet, ResNetConfig
from candid.data.images import to_float
from candid.data.uploads import decode_upload
from candid.explanations.counterfactual import counterfactual
from candid.explanations.explainer import Explainer
from candid.explanations.similarity import similarity
from candid.judging.examine import Examiner
from candid.serve.app import PAGE
from candid.serve.schemas import ImageRequest
from candid.serve.service import Service, as_png
from candid.trust.ranking import ALL
from candid.trust.verdict import KINDS, Examination
from tests.helpers import small_classifier
from tests.serve.helpers import NAMES, Running, huge_png, picture, running, without_rounding


def from_library(model: Any, folder: Path, *files: bytes) -> list[Examination]:
    """What ``candid examine`` says of the same files."""
    paths = [folder / f"{i}.png" for i in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    found = list(Examiner(model, evidence=True).examine(paths))
    assert all(isinstance(each, Examination) for each in found)
    return [each for each in found if isinstance(each, Examination)]


def test_answers_are_those_of_the_library(
    server: Running, model: GenerativeClassifier, tmp_path: Path
) -> None:
    files = [picture(1), picture(2, (40, 30)), picture(3, (20, 20), "JPEG")]
    answer = server.examine(*files).json()
    assert answer["model"] == "small"
    for i, (found, expected) in enumerate(
        zip(answer["results"], from_library(model, tmp_path, *files), strict=True)
    ):
        assert found == without_rounding(
            expected.to_dict() | {"status": "judged", "path": f"{i}.png", "seen": None, "explanation": None}
        )


def test_explanations_are_those_of_the_library(
    server: Running, model: GenerativeClassifier, tmp_path: Path
) -> None:
    (found,) = server.examine(picture(1), explain=True).json()["results"]
    (expected,) = from_library(model, tmp_path, picture(1))
    assert expected.evidence is not None
    explained = Explainer(model, 3).explain(expected)
    assert explained.summary is not None and not isinstance(explained.maps, str)
    answer = found["explanation"]
    assert answer["summary"] == explained.summary.sentence and answer["kind"] == explained.summary.kind
    maps = answer["heatmaps"]
    assert [each["class"] for each in maps["classes"]] == list(expected.posterior)
    for i, each in enumerate(maps["classes"]):
        assert np.array(each["values_nats"]) == pytest.approx(explained.maps.values[i], abs=1e-4)
        assert np.sum(each["values_nats"]) == pytest.approx(each["log_posterior_nats"], abs=1e-4)
    assert np.array(maps["saliency_nats"]) == pytest.approx(explained.maps.saliency, rel=1e-4)
    space = answer["decision_space"]
    for name in (
        *("along", "away", "half_width", "half_height", "boundary", "means_along", "means_away"),
        *("outside", "outside_expected"),
    ):
        assert space[name] == pytest.approx(getattr(explained.space, name), abs=1e-4)
    seen = np.array(Image.open(BytesIO(base64.b64decode(found["seen"]))))
    assert np.array_equal(seen.transpose(2, 0, 1), expected.evidence.image)
    distances = similarity(model, order="given").distances[NAMES.index(expected.label)]
    assert [each["distance"] for each in answer["nearest_classes"]] == pytest.approx(
        np.sort(distances)[1:].tolist()
    )


def test_a_counterfactual_is_that_of_the_library(server: Running, model: GenerativeClassifier) -> None:
    image = decode_upload(picture(1), model.preprocessing, 10_000)
    goal = int(model.outputs(to_float(image[None])).logits[0].argmin())
    expected = counterfactual(model.frozen(), image, goal, 0.6)
    form = {"towards": NAMES[goal], "target": "0.6"}
    answer = server.client.post("/v1/counterfactual", files={"file": picture(1)}, data=form).json()["result"]
    assert answer["status"] == "changed" and answer["class"] == NAMES[goal] and answer["reached"]
    assert answer["posterior"] == pytest.approx(float(expected.posterior[goal]), abs=1e-4)
    assert answer["bits_per_dim"] == pytest.approx(expected.bits_per_dim, rel=1e-4)
    last = np.array(Image.open(BytesIO(base64.b64decode(answer["steps"][-1]["image"]))))
    assert np.array_equal(last.transpose(2, 0, 1), expected.image)
    assert [step["posterior"] for step in answer["steps"]] == pytest.approx(
        expected.posteriors[:, goal].tolist(), abs=1e-4
    )
    form["target"] = str(float(expected.posteriors[0, goal]) / 2)
    answer = server.client.post("/v1/counterfactual", files={"file": picture(1)}, data=form).json()["result"]
    assert answer["status"] == "impossible" and "already has" in answer["error"]
    answer = server.client.post("/v1/counterfactual", files={"file": b""}, data=form).json()["result"]
    assert answer["status"] == "unusable" and "is empty" in answer["error"]


def test_bad_files_among_good_ones_get_a_sentence_each(server: Running) -> None:
    files = [
        picture(1),
        b"",
        b"text, not an image",
        picture(2, (64, 64), "JPEG")[:700],
        huge_png(),
        picture(2),
    ]
    answer = server.examine(*files)
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [each["status"] for each in results] == ["judged", *["unusable"] * 4, "judged"]
    for found, reason in zip(results[1:5], ("empty", "not an image", "incomplete", "pixels"), strict=True):
        assert found["error"].startswith("This file can't be used: ") and found["error"].endswith(".")
        assert reason in found["error"]
    alone = server.examine(picture(2)).json()["results"][0]
    assert results[-1] | {"path": "0.png"} == without_rounding(alone)


def test_an_answer_does_not_depend_on_its_batch(server: Running, service: Service) -> None:
    images = [decode_upload(picture(i), service.description.preprocessing, 10_000) for i in range(12)]
    asked = [ImageRequest(f"{i}.png", image, explain=True) for i, image in enumerate(images)]
    first, second = service.examine([asked[:5], asked[5:]])
    assert not isinstance(first, Exception) and not isinstance(second, Exception)
    for one, each in zip(asked, [*first, *second], strict=True):
        (alone,) = service.examine([[one]])
        assert not isinstance(alone, Exception)
        assert each.model_dump(mode="json") == without_rounding(alone[0].model_dump(mode="json"))


def test_the_model_is_described(server: Running, model: GenerativeClassifier) -> None:
    (found,) = server.client.get("/v1/models").json()["models"]
    assert found["name"] == "small" and found["kind"] == "generative" and found["classes"] == list(NAMES)
    assert found["image_shape"] == [3, 16, 16] and found["cannot"] == []
    rule = Examiner(model).rule
    assert rule is not None
    held_out = found["held_out"]
    assert held_out["images"] == 150 and held_out["novelty"] == rule.promises[ALL].novelty.in_force
    scores, p_values = held_out["tail"]["scores"], held_out["tail"]["p_values"]
    assert scores == sorted(scores) and p_values == sorted(p_values, reverse=True)
    statistic, detector = rule.rankings[0].values, rule.rankings[0].detector(ALL)
    inside = detector.score(statistic) <= scores[-1]
    assert np.interp(detector.score(statistic)[inside], scores, p_values) == pytest.approx(
        detector.p_value(statistic)[inside], abs=0.05
    )
    assert [each["kind"] for each in found["verdicts"]] == list(KINDS)
    assert all({**KINDS[each["kind"]]._asdict(), "kind": each["kind"]} == each for each in found["verdicts"])


def test_a_resnet_says_what_it_cant_show() -> None:
    config = ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3")
    with running(Service(ResNet(config, NAMES).eval(), "resnet")) as server:
        (found,) = server.client.get("/v1/models").json()["models"]
        assert found["kind"] == "resnet" and found["held_out"] is None
        assert "ResNet" in found["cannot"][0] and "candid calibrate" in found["cannot"][1]
        (judged,) = server.examine(picture(), explain=True).json()["results"]
        assert judged["explanation"] is None and judged["seen"] and judged["p_value"] is None
        form = {"towards": "dog"}
        answer = server.client.post("/v1/counterfactual", files={"file": picture()}, data=form).json()
        assert answer["result"]["status"] == "impossible" and "ResNet" in answer["result"]["error"]


def test_a_model_without_held_out_scores_judges_without_a_verdict() -> None:
    with running(Service(small_classifier().requires_grad_(False), "plain")) as server:
        (found,) = server.client.get("/v1/models").json()["models"]
        assert found["held_out"] is None and len(found["cannot"]) == 1
        (judged,) = server.examine(picture(), explain=True).json()["results"]
        assert judged["p_value"] is None and judged["verdict"] is None and judged["classes"] is None
        assert judged["explanation"]["summary"].endswith(".")


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({"files": {"image": picture()}}, 422, "multipart field 'file'"),
        ({"data": {"file": "text"}}, 422, "multipart field 'file'"),
        ({"files": [("file", picture())] * 17}, 422, "at most 16"),
        ({"json": {"file": "text"}}, 422, "multipart field 'file'"),
        ({"files": {"file": picture()}, "params": {"explain": "maybe"}}, 422, "'explain' is wrong"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
    ],
)
def test_wrong_requests_get_one_sentence(
    server: Running, request_: dict[str, Any], status: int, words: str
) -> None:
    answer = server.client.post("/v1/examine", **request_)
    assert answer.status_code == status and list(answer.json()) == ["error"]
    assert words in answer.json()["error"]


def test_an_unknown_class_or_target_is_said(server: Running) -> None:
    for form, words in (({"towards": "dgo"}, "no such class"), ({"towards": "dog", "target": 2}, "'target'")):
        answer = server.client.post("/v1/counterfactual", files={"file": picture()}, data=form)
        assert answer.status_code == 422 and words in answer.json()["error"]


def test_metrics_count(service: Service) -> None:
    with running(service) as server:
        server.examine(picture(), b"")
        server.client.get("/nothing")
        verdict = server.examine(picture()).json()["results"][0]["verdict"]
        assert server.metric('candid_requests_total{path="/v1/examine",status="200"}') == 2
        assert server.metric('candid_requests_total{path="other",status="404"}') == 1
        assert server.metric(f'candid_images_total{{verdict="{verdict}"}}') == 2
        assert server.metric('candid_images_total{verdict="unusable"}') == 1
        assert server.metric('candid_request_seconds_bucket{le="+Inf"}') >= 3
        assert server.metric("candid_queue_length") == 0
        assert server.client.get("/metrics").headers["content-type"].startswith("text/plain; version=1.0.0")


def test_the_schema_names_the_classes_and_every_error(server: Running) -> None:
    schema = server.client.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        *("/v1/examine", "/v1/counterfactual", "/v1/picture", "/v1/models", "/v1/example", "/v1/drift"),
        *("/healthz", "/readyz", "/metrics"),
    }
    codes = set(schema["paths"]["/v1/examine"]["post"]["responses"])
    assert codes == {"200", "400", "403", "404", "408", "413", "415", "422", "429", "500", "503"}
    form = schema["components"]["schemas"]["Body_counterfactual_v1_counterfactual_post"]
    assert form["properties"]["towards"]["enum"] == list(NAMES)
    assert "HTTPValidationError" not in json.dumps(schema)


def test_grey_images_are_sent_as_they_are() -> None:
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    assert np.array_equal(np.array(Image.open(BytesIO(base64.b64decode(as_png(image))))), image[0])


def test_a_name_that_is_no_text_comes_back_as_one(server: Running) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="\\ud800.png"\r\n\r\n'
    for content, status in ((picture(), "judged"), (b"no image", "unusable")):
        answer = server.client.post(
            "/v1/examine",
            content=head + content + b"\r\n--x--\r\n",
            headers={"content-type": "multipart/form-data; boundary=x; charset=unicode_escape"},
        )
        assert answer.status_code == 200
        (found,) = answer.json()["results"]
        assert found["status"] == status and found["path"] == "?.png"


def test_an_adopted_model_explains_with_heatmaps_that_add_up() -> None:
    service = Service.load("everyday", "everyday")
    assert service.description.info.can == ["which parts of the image speak for which class"]
    grey = ImageRequest("grey.png", np.full((3, 224, 224), 128, dtype=np.uint8), explain=True)
    (answer,) = service.examine([[grey]])
    assert not isinstance(answer, Exception)
    found = answer[0].model_dump(mode="json", by_alias=True)
    explanation = found["explanation"]
    assert explanation["decision_space"] is None and explanation["nearest_classes"] == []
    first, second, _ = explanation["heatmaps"]["classes"]
    assert first["class"] == found["label"]
    for each in (first, second):
        assert np.sum(each["values_nats"]) == pytest.approx(each["score_nats"] - each["baseline_nats"])
    odds = first["log_posterior_nats"] - second["log_posterior_nats"]
    assert first["score_nats"] - second["score_nats"] == pytest.approx(odds, abs=1e-3)


def test_the_server_draws_what_a_browser_cant_and_images_count_once(server: Running) -> None:
    content = (Path(__file__).parent.parent / "data" / "turned.heic").read_bytes()
    answer = server.client.post("/v1/picture", files={"file": content})
    assert answer.headers["content-type"] == "image/jpeg"
    drawn = Image.open(BytesIO(answer.content))
    assert drawn.size == (48, 64)  # upright
    refused = server.client.post("/v1/picture", files={"file": picture()[:40]})
    assert refused.status_code == 422 and "can't be used" in refused.json()["error"]
    watched = server.client.get("/v1/drift").json()["images"]
    assert server.client.post("/v1/examine?again=true", files={"file": content}).status_code == 200
    assert server.client.get("/v1/drift").json()["images"] == watched
    assert server.client.get("/v1/example?name=cat.jpg").status_code == 404  # the model is not bundled


def test_the_page_makes_no_promise_of_its_own() -> None:
    claims = re.compile(r"\b(exact\w*|guarante\w+|proven?|at (least|most) [\w$]|always right|certain\w*)\b")
    for file in PAGE.iterdir():
        lines = file.read_text(encoding="utf-8").splitlines()
        said = [line for line in lines if not line.strip().startswith("//") and "//" not in line]
        assert [line for line in said if claims.search(line)] == [], file.name
