"""The requests and responses of the JSON API; a judgement is what ``Examination.to_dict`` returns."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from candid._support.numbers import Array
from candid.trust.verdict import Sighting, Verdict


@dataclass(frozen=True)
class ImageRequest:
    """An image as the model sees it, and what is asked about it."""

    path: str
    image: Array
    explain: bool = False
    towards: int = 0
    target: float = 0.5


class ErrorResponse(BaseModel):
    """Why a request was refused."""

    error: str = Field(description="One sentence.")


class ClassMapResponse(BaseModel):
    """What speaks for and against a class, by position."""

    class_: str = Field(serialization_alias="class")
    log_posterior_nats: float
    values_nats: list[list[float]] = Field(
        description="Rows from the top; they add up to the log posterior, or to score_nats - baseline_nats."
    )
    score_nats: float | None = Field(
        None, description="Photo models: the logit of the class minus the mean of all logits."
    )
    baseline_nats: float | None = Field(None, description="The same of the average training photo.")


class HeatmapsResponse(BaseModel):
    """Heatmaps over the positions of the last feature maps; of a photo model, over the centre square."""

    saliency_nats: list[list[float]] | None = Field(
        description="The information that the model finds there; null for a photo model."
    )
    classes: list[ClassMapResponse] = Field(description="The most probable classes, falling.")


class DecisionSpaceResponse(BaseModel):
    """The image between its most probable classes; all lengths in standard deviations of a class."""

    posterior: dict[str, float] = Field(description="The most probable classes, falling.")
    along: float = Field(description="Position on the line through the first two means, 0 in their middle.")
    away: float = Field(description="Distance from that line.")
    means_along: list[float]
    means_away: list[float]
    half_width: float = Field(description="Half axis along the line of the ellipse with 90 % of a class.")
    half_height: float = Field(description="Its other half axis: distance from the line.")
    boundary: float = Field(description="Where on the line the first two classes are equally probable.")
    inside: tuple[bool, bool] = Field(description="Whether the image lies in the ellipses of the first two.")
    outside: float = Field(
        description="Distance of the image from the space itself, in all other directions."
    )
    outside_expected: float = Field(description="The distance that the model expects there.")


class NeighbourResponse(BaseModel):
    """A class that is near the most probable one."""

    class_: str = Field(serialization_alias="class")
    distance: float = Field(description="Distance of the two, in standard deviations of a class.")
    expected_uncertainty: float = Field(description="Uncertainty of a decision between the two, 0 to 1/2.")
    measured_uncertainty: float | None = Field(description="The same on held-out images, if it is known.")


class KnownPhotoResponse(BaseModel):
    """A photo that is kept with a photo model."""

    class_: str = Field(serialization_alias="class")
    image: str = Field(description="A small JPEG in base64.")


class NearestPhotosResponse(BaseModel):
    """The known photos that are nearest to the photo, nearest first."""

    nearest: list[KnownPhotoResponse] = Field(description="Of all classes.")
    instead: str = Field(description="The class that it could be instead: the second most probable one.")
    of_instead: list[KnownPhotoResponse] = Field(description="Of that class.")


class ExplanationResponse(BaseModel):
    """Why the model says it."""

    kind: Literal["confident", "ambiguous", "several interpretations", "novel"] | None
    summary: str | None = Field(description="The explanation in one or two sentences.")
    heatmaps: HeatmapsResponse | None = Field(description="Null if the eye of a photo model gives no maps.")
    decision_space: DecisionSpaceResponse | None = Field(
        description="Null, as are kind and summary, of an adopted model, which has no class means."
    )
    nearest_classes: list[NeighbourResponse]
    nearest_photos: NearestPhotosResponse | None = Field(
        None, description="Photo models that keep thumbnails of known photos."
    )


class LevelResponse(BaseModel):
    """A promise about a rate."""

    asked: float | None
    in_force: float
    smallest: float = Field(description="The smallest level that the held-out images allow.")
    promise: Literal["average", "confident"] = Field(
        description="On average over held-out sets, or with 95 % confidence for this model."
    )
    proven: float = Field(description="What is proven for the average.")
    upper: float = Field(description="The 95 % upper end of the rate for this model.")
    cut: float = Field(description="Images with a p-value of at most this are rejected.")


class RiskResponse(BaseModel):
    """The promise about accepted images: at most a share of ``asked`` is wrong."""

    asked: float
    delta: float = Field(description="The probability that the promise is wrong.")
    threshold: float = Field(description="Images of at least this confidence are accepted.")
    coverage: float = Field(description="The share of tested held-out images that is accepted.")
    images: int
    accepted: int
    errors: int


class PromisesResponse(BaseModel):
    """What the verdict promises."""

    score: str
    n_reference: int = Field(description="Held-out images that the image is ranked among.")
    novelty: LevelResponse
    error: LevelResponse
    risk: RiskResponse | None = None
    confidence: float = Field(0.0, description="An accepted answer has at least this posterior.")
    fdr: float | None = Field(None, description="The rate of false discoveries, if it decides.")
    fdr_proven: bool = Field(True, description="Whether this rate is proven.")
    accept_kinds: int = Field(0, description="Named kinds of at most this many classes are accepted, too.")
    out_of_fold: bool = Field(False, description="Held-out images trained the model: no bound is proven.")
    copies: int = Field(0, description="Held-out images that are copies of others: they count once.")
    occasions: bool = Field(False, description="Held-out images are of the occasions of the training images.")
    unmeasured: int = Field(0, description="Classes taught from too few photos for an error of their own.")
    plain: str = Field("", description="The promises in one line.")
    sentences: list[str] = Field([], description="The promises in words, with all numbers and conditions.")


class ExaminationResponse(BaseModel):
    """What the model says about an image: the keys of ``candid examine --json``."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["judged"] = "judged"
    path: str = Field(description="The name of the file.")
    label: str = Field(description="The most probable class.")
    confidence: float = Field(description="The largest posterior.")
    posterior: dict[str, float] = Field(description="The five most probable classes, falling.")
    p_value: float | None = Field(description="Among held-out images; null without held-out scores.")
    class_p_value: float | None = Field(description="Among held-out images of the same predicted class.")
    verdict: Verdict | None
    plain: str = Field(description="What the verdict means, in one line.")
    classes: list[str] | None = Field(
        description="The classes that the answer names, at most the five likeliest; none of a novel image."
    )
    class_count: int | None = Field(description="The number of classes that the answer names.")
    node: str | None = Field(description="A kind that covers them, such as 'terrier'; null for a list.")
    node_leaves: int | None = Field(description="The number of classes of that kind.")
    log_density_nats: float | None = Field(description="Log density of the 8-bit image, or of its features.")
    promises: PromisesResponse | None
    seen: str | None = Field(
        default=None, description="The image as the model sees it, a PNG in base64; on request."
    )
    explanation: ExplanationResponse | None = Field(
        default=None, description="On request; null for a ResNet."
    )
    _sighting: Sighting | None = PrivateAttr(default=None)  # for the watch for drift; it is not sent


class UnusableResponse(BaseModel):
    """A file that can't be judged."""

    status: Literal["unusable"] = "unusable"
    path: str
    error: str


class EncodedResponse(NamedTuple):
    """A result as it is sent: the process that makes it need not be the one that sends it."""

    kind: str
    """For the counts: the verdict, ``unusable`` or ``no verdict``."""
    json: bytes
    sighting: Sighting | None = None
    """What a watch for drift needs to know; None of an image that can't be used."""
    record: dict[str, Any] | None = None
    """What a list of verdicts shows of the result; None of an image that can't be used."""

    @classmethod
    def of(cls, response: ExaminationResponse | UnusableResponse) -> "EncodedResponse":
        """Return the response as JSON."""
        json = response.model_dump_json(by_alias=True).encode()
        if isinstance(response, UnusableResponse):
            return cls(response.status, json)
        record = {name: getattr(response, name) for name in ("label", "confidence", "p_value")}
        return cls(response.verdict or "no verdict", json, response._sighting, record)


class ExamineResponse(BaseModel):
    """One result for each file, in their order."""

    model: str
    version: int = Field(default=0, description="See GET /v1/lessons; 0 as the server was started.")
    stored: list[int | None] | None = Field(
        default=None, description="The numbers of stored images; null if this server stores none."
    )
    results: list[Annotated[ExaminationResponse | UnusableResponse, Field(discriminator="status")]]


class StepResponse(BaseModel):
    """An 8-bit image on the path of the change."""

    image: str = Field(description="A PNG in base64.")
    posterior: float = Field(description="Posterior of the class that is aimed at.")
    posterior_before: float = Field(description="Posterior of the class that the image had at first.")


class ChangedResponse(BaseModel):
    """How the image would have to change."""

    status: Literal["changed"] = "changed"
    path: str
    class_: str = Field(serialization_alias="class", description="The class that is aimed at.")
    class_before: str
    target: float
    posterior: float
    reached: bool = Field(description="Whether the posterior is the target, up to 0.01.")
    length_in_standard_deviations: float
    bits_per_dim: tuple[float, float] = Field(description="Bits/dim of the image before and after.")
    steps: list[StepResponse] = Field(description="From the image itself to the changed one.")


class ImpossibleResponse(BaseModel):
    """There is no such change."""

    status: Literal["impossible"] = "impossible"
    path: str
    error: str


class CounterfactualResponse(BaseModel):
    """What would make it a different class."""

    model: str
    result: Annotated[ChangedResponse | ImpossibleResponse | UnusableResponse, Field(discriminator="status")]


class TailResponse(BaseModel):
    """How p-values fall with the outlier score: a share of p of the held-out images scores more."""

    scores: list[float] = Field(description="Rising.")
    p_values: list[float] = Field(description="The p-values at these scores, falling.")


class HeldOutResponse(BaseModel):
    """What p-values and verdicts come from."""

    images: int
    score: str
    novelty: float = Field(description="False-alarm rate: images with this p-value or less are novel.")
    error: float = Field(description="Error level: see the promises of a result.")
    tail: TailResponse


class LimitsResponse(BaseModel):
    """What the server accepts in one request."""

    files: int
    megabytes: float
    pixels: int


class VerdictResponse(BaseModel):
    """A verdict that the model can give."""

    kind: str = Field(description="Its name in results.")
    word: str
    sentence: str = Field(description="What it means.")
    tone: str = Field(description="good, fair or poor.")
    colour: str = Field(description="On a light ground.")
    dark_colour: str = Field(description="On a dark ground.")


class ModelResponse(BaseModel):
    """A model that can be asked."""

    name: str
    version: int = Field(default=0, description="The lesson that it comes from; 0 as the server was started.")
    kind: str
    summary: str | None
    classes: list[str]
    image_shape: tuple[int, int, int] = Field(description="Channels, height, width.")
    margin: float = Field(
        default=1.0,
        description="Images are resized to cover this many times the image size; the model sees the centre.",
    )
    held_out: HeldOutResponse | None
    verdicts: list[VerdictResponse] = Field(description="All verdicts, those that need attention first.")
    abilities: list[str] = Field(description="What the model is able to do, by name.")
    can: list[str] = Field(description="What an explanation shows, to go on after 'it shows'.")
    cannot: list[str] = Field(description="What the model can't show, and why: one sentence each.")
    examples: list[str] = Field(default=[], description="Photos to try it with: GET /v1/example?name=")
    limits: LimitsResponse | None = None
    stores_images: bool = Field(
        default=False, description="Whether this server stores the images that it judges."
    )


class ModelsResponse(BaseModel):
    """All models of this server."""

    models: list[ModelResponse]


class CarrierResponse(BaseModel):
    """An image that carried the evidence."""

    image: int = Field(description="Its number among all images that were watched, from 1.")
    name: str | None = Field(description="Its file, if this server stores images.")
    gain: float = Field(description="What the evidence was multiplied by.")


class DriftResponse(BaseModel):
    """Whether the judged images have changed since the held-out ones."""

    watching: bool = Field(description="Whether the model has the held-out scores that a watch needs.")
    sentence: str
    alarm: bool = False
    after: int | None = Field(default=None, description="Images until the alarm rang.")
    evidence: float | None = Field(default=None, description="The alarm rings at 1 / level.")
    level: float | None = Field(
        default=None,
        description="The probability that the alarm ever rings if nothing changes: see 'proven'.",
    )
    proven: bool | None = Field(
        default=None, description="Whether this level is proven: not if held-out images trained the model."
    )
    caveat: str | None = Field(default=None, description="What is not proven, in words.")
    images: int = Field(default=0, description="Images that were watched.")
    held_out: int | None = None
    since: int | None = Field(default=None, description="About the first image that had changed.")
    directions: list[str] = []
    carriers: list[CarrierResponse] = Field(
        default=[], description="The images that carried most of the evidence."
    )


class StoredResponse(BaseModel):
    """A stored image and what was said of it."""

    id: int
    file: str = Field(description="In the folder 'images' of the store.")
    verdict: str
    label: str
    confidence: float
    p_value: float | None


class VerdictsResponse(BaseModel):
    """Stored images by verdict, those that need attention first, of any age; then newest first."""

    stored: dict[str, int] = Field(description="All stored images by verdict.")
    verdicts: list[StoredResponse]


class CorrectionResponse(BaseModel):
    """What a person says that a stored image shows."""

    id: int
    said: str = Field(description="The class that the model named.")
    class_: str = Field(serialization_alias="class")
    waiting: bool = Field(description="Whether the model that answers now has not learned it.")


class GroupResponse(BaseModel):
    """Novel images that belong together."""

    name: str
    ids: list[int] = Field(description="The most central image first.")
    nearest: str = Field(description="The known class that they resemble most.")


class RecallResponse(BaseModel):
    """The share of the held-out photos of a class that is recognised."""

    class_: str = Field(serialization_alias="class")
    before: float
    after: float


class LessonResponse(BaseModel):
    """A model that was taught from corrections."""

    version: int
    made: str = Field(description="When, as UTC.")
    photos: dict[str, int] = Field(description="The photos that it was taught, by class.")
    classes: list[str] = Field(description="The classes that are new.")
    sentences: list[str] = Field(description="What it learned, and the price of it.")
    recalls: list[RecallResponse] = Field(description="Of the known classes on held-out photos.")
    in_use: bool = Field(description="Whether it answers now.")


class LessonsResponse(BaseModel):
    """What people taught a model, and what they could teach it."""

    model: str
    version: int = Field(description="The lesson that answers now; 0 is the model as it was started.")
    cannot: str | None = Field(description="Why it can't be taught; null if it can.")
    busy: Literal["teaching", "grouping", "loading"] | None = Field(description="What the server does now.")
    problem: str | None = Field(description="Why the last job failed.")
    waiting: int = Field(description="Corrections that the model has not learned.")
    few: dict[str, int] = Field(description="New classes with too few photos, and how many they still need.")
    corrections: list[CorrectionResponse]
    novel: int = Field(description="Stored novel images without a correction.")
    groups: list[GroupResponse] | None = Field(description="Null until POST /v1/groups.")
    singles: list[int] = Field(description="Novel images that fit no group.")
    lessons: list[LessonResponse] = Field(description="Oldest first.")


class ReadyResponse(BaseModel):
    """The server answers requests at once."""

    status: Literal["ready"] = "ready"


class HealthResponse(BaseModel):
    """The server works."""

    status: Literal["ok"] = "ok"
    needs_token: bool
