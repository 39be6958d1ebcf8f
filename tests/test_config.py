from dataclasses import replace

import pytest

from candid import PRESETS, CandidError, ClassifierConfig
from candid.config import from_dict, to_dict


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_survives_json(name: str) -> None:
    import json

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
        ({"rank": 0}, "'rank' must be at least 1"),
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
