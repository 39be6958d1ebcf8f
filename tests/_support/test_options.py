import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from candid import PRESETS, CandidError, ClassifierConfig
from candid._support.options import MaybeInfinite, check_fields, from_dict, to_dict


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_survives_json(name: str) -> None:
    config = PRESETS[name]
    assert from_dict(ClassifierConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clases": 3}, "Unknown key 'clases'.*did you mean 'classes'"),
        ({"classes": "3"}, "'classes' must be of type int, not '3'"),
        ({"classes": True}, "'classes' must be of type int"),
        ({"classes": 0}, "'classes' must be at least 1"),
        ({"rank": 1.5}, "'rank' must be of type int"),
        ({"mean": 0.5}, "'mean' must be a list"),
        ({"mean": [0.5, 0.5]}, "one number or one a channel"),
        ({"std": [0.0]}, "'std' must be positive"),
        ({"mean": ["a"]}, r"'mean\[0\]' must be of type float"),
        ({"flow": 3}, "must be a table"),
        ({"rank": -1}, "'rank' must be at least 0"),
        ({"classes": 10**30}, "at most 10000000"),
        ({"std": [float("inf")]}, r"'std\[0\]' must be a finite number"),
        ({"mean": [10**400]}, r"'mean\[0\]' must be a finite number"),
        ({"priors": [0.5, 0.5]}, "10 classes but 2 class priors"),
        ({"flow": {}}, "lacks the key 'flow.channels'"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        from_dict(ClassifierConfig, to_dict(PRESETS["cifar"]) | changes)


def test_whole_numbers_do_for_floats() -> None:
    assert from_dict(ClassifierConfig, to_dict(PRESETS["digits"]) | {"std": [1]}).std == (1.0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixing": "soft"}, "'mixing' can't be 'soft'"),
        ({"dct": "relased"}, "did you mean 'released'"),
        ({"entry": "5x5"}, "'entry' can't be '5x5'"),
        ({"actnorm": "x"}, "'actnorm' can't be"),
        ({"clamp": float("nan")}, "'clamp' must be a finite number"),
        ({"height": 2**40}, "at most 65536"),
        ({"dct": "released", "width": 64}, "square images"),
    ],
)
def test_constructors_check_as_files_do(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CandidError, match=message):
        replace(PRESETS["cifar"].flow, **changes)  # type: ignore[arg-type]


def test_lists_do_for_tuples() -> None:
    assert hash(replace(PRESETS["cifar"].flow, blocks=[1, 1, 1])) == hash(  # type: ignore[arg-type]
        replace(PRESETS["cifar"].flow, blocks=(1, 1, 1))
    )


@dataclass(frozen=True)
class Settings:
    beta: MaybeInfinite = 1.0
    limit: MaybeInfinite | None = None
    rate: float = 0.1
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize("key", ["beta", "limit"])
@pytest.mark.parametrize("value", [math.inf, 0.0, -2.5, 3])
def test_a_field_may_take_infinity(key: str, value: float) -> None:
    found = from_dict(Settings, {key: value})
    assert getattr(found, key) == value and isinstance(getattr(found, key), float)
    assert from_dict(Settings, to_dict(found)) == found
    assert Settings(**{key: value}) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("beta", math.nan, "'beta' must be a finite number"),
        ("beta", -math.inf, "'beta' must be a finite number"),
        ("beta", 10**400, "'beta' must be a finite number"),
        ("beta", "inf", "'beta' must be of type float, not 'inf'"),
        ("beta", True, "'beta' must be of type float"),
        ("beta", None, "'beta' must be of type float"),
        ("limit", math.nan, "'limit' must be a finite number"),
        ("limit", "1", "'limit' must be of type float"),
        ("rate", math.inf, "'rate' must be a finite number"),
        ("model", 3, "'model' must be a table of keys, not 3"),
        ("model", [("blocks", 1)], "'model' must be a table of keys"),
        ("model", {1: "a"}, "'model' must be a table of keys"),
    ],
)
def test_what_is_no_number_or_table_is_refused(key: str, value: Any, message: str) -> None:
    for make in (lambda: from_dict(Settings, {key: value}), lambda: Settings(**{key: value})):
        with pytest.raises(CandidError, match=message):
            make()


def test_a_table_is_kept_as_it_is_and_copied() -> None:
    table = {"blocks": [2, 2], "entry": "none", "inner": {"a": 1}}
    found = Settings(model=table)
    table["entry"] = "3x3"
    assert found.model["entry"] == "none"
    plain = json.loads(json.dumps(to_dict(replace(found, model={**found.model, "widths": (4, 8)}))))
    assert plain["model"] == {"blocks": [2, 2], "entry": "none", "inner": {"a": 1}, "widths": [4, 8]}
    assert from_dict(Settings, plain).model == plain["model"]
