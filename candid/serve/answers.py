"""The answers of the JSON API, with the names that ``candid examine --json`` uses."""

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field


class Problem(BaseModel):
    """Why a request was refused."""

    error: str
    """One sentence."""


class ClassShare(BaseModel):
    """A class and its posterior."""

    class_: str = Field(serialization_alias="class")
    posterior: float


class ClassMap(BaseModel):
    """What speaks for and against a class, by position."""

    class_: str = Field(serialization_alias="class")
    log_posterior_nats: float
    values_nats: list[list[float]] = Field(description="Rows from the top; they add up to the log posterior.")


class Maps(BaseModel):
    """Heatmaps over the positions of the last feature maps."""

    saliency_nats: list[list[float]] = Field(description="The information that the model finds there.")
    classes: list[ClassMap] = Field(description="Of the most probable classes, falling.")


class Space(BaseModel):
    """The image between its most probable classes; all lengths in standard deviations of a class."""

    classes: list[ClassShare]
    along: float = Field(description="On the line through the first two means, 0 in their middle.")
    away: float = Field(description="The distance from that line.")
    means_along: list[float]
    means_away: list[float]
    half_width: float = Field(description="90 % of a class lie this close to its mean, along the line.")
    half_height: float = Field(description="The same for the distance from the line.")
    boundary: float = Field(description="Where on the line the first two classes are equally probable.")


class Neighbour(BaseModel):
    """A class whose mean is near that of the most probable one."""

    class_: str = Field(serialization_alias="class")
    distance: float = Field(description="Of the means, in standard deviations of a class.")
    expected_uncertainty: float = Field(description="Of a decision between the two, 0 to 1/2.")


class Explained(BaseModel):
    """Why the model says it."""

    reading: Literal["confident", "ambiguous", "several interpretations", "novel"]
    in_words: str
    heatmaps: Maps
    decision_space: Space
    nearest_classes: list[Neighbour]


class Judged(BaseModel):
    """What the model says of an image."""

    status: Literal["judged"] = "judged"
    file: str
    class_: str = Field(serialization_alias="class")
    posterior: float
    classes: list[ClassShare] = Field(description="The most probable ones, falling.")
    p_value: float | None = Field(description="Among held-out images; null without held-out scores.")
    p_value_in_class: float | None
    verdict: Literal["accept", "ambiguous", "novel"] | None
    agreeing: list[str] | None = Field(description="The classes that the verdict can't rule out.")
    log_density_nats: float | None = Field(description="Of the 8-bit image; null for a ResNet.")
    seen: str | None = Field(description="The image as the model sees it, a PNG in base64; on request.")
    explanation: Explained | None = Field(description="On request; null for a ResNet.")


class Unusable(BaseModel):
    """A file that can't be judged."""

    status: Literal["unusable"] = "unusable"
    file: str
    error: str


class Sent(NamedTuple):
    """A result as it is sent: what makes it need not be what sends it."""

    kind: str
    """For the counts: the verdict, ``unusable`` or ``no verdict``."""
    json: bytes

    @classmethod
    def of(cls, found: Judged | Unusable) -> "Sent":
        """Written out."""
        kind = found.verdict or "no verdict" if isinstance(found, Judged) else found.status
        return cls(kind, found.model_dump_json(by_alias=True).encode())


class Examined(BaseModel):
    """One result for each file, in their order."""

    model: str
    results: list[Annotated[Judged | Unusable, Field(discriminator="status")]]


class Step(BaseModel):
    """An 8-bit image on the way."""

    image: str = Field(description="A PNG in base64.")
    posterior: float = Field(description="Of the class that is aimed at.")
    posterior_before: float = Field(description="Of the class that the image had at first.")


class Changed(BaseModel):
    """How the image would have to change."""

    status: Literal["changed"] = "changed"
    file: str
    class_: str = Field(serialization_alias="class", description="The one that is aimed at.")
    class_before: str
    target: float
    posterior: float
    reached: bool = Field(description="Whether the posterior is the target, up to 0.01.")
    length_in_standard_deviations: float
    bits_per_dim: tuple[float, float] = Field(description="Of the image before and after.")
    steps: list[Step] = Field(description="From the image itself to the changed one.")


class Impossible(BaseModel):
    """There is no such change."""

    status: Literal["impossible"] = "impossible"
    file: str
    error: str


class Counterfactuals(BaseModel):
    """What would make it another class."""

    model: str
    result: Annotated[Changed | Impossible | Unusable, Field(discriminator="status")]


class Tail(BaseModel):
    """How p-values fall with the outlier score: a share of p of held-out images scores more."""

    scores: list[float] = Field(description="Rising.")
    p_values: list[float] = Field(description="At these scores, falling.")


class HeldOutScores(BaseModel):
    """What p-values and verdicts come from."""

    images: int
    test: str
    novelty: float = Field(description="Images with this p-value or less are novel.")
    error: float = Field(description="Share of usual images whose class may be missing among those named.")
    tail: Tail


class Taken(BaseModel):
    """What the server takes."""

    files: int
    megabytes: float
    pixels: int


class ModelInfo(BaseModel):
    """A model that can be asked."""

    name: str
    kind: str
    summary: str | None
    classes: list[str]
    image_shape: tuple[int, int, int] = Field(description="Channels, height, width.")
    held_out: HeldOutScores | None
    cannot: list[str] = Field(description="What it can't show, and why: one sentence each.")
    limits: Taken


class Models(BaseModel):
    """All models of this server."""

    models: list[ModelInfo]


class Health(BaseModel):
    """The server is up and takes requests."""

    status: Literal["ok"] = "ok"
    needs_token: bool
