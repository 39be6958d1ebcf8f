"""The server keeps what its own description promises, whatever it is sent."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import sampled_from
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection

from tests.serve.helpers import Running, picture

WORK = ("/v1/examine", "/v1/counterfactual")
FILES = (picture(), picture(1, (40, 30), "JPEG"), picture(2)[:-20])
"""What a description can't describe: images, one of them cut."""
CASES = [(address, mode) for address in WORK for mode in GenerationMode]
CASES += [(address, GenerationMode.POSITIVE) for address in ("/v1/models", "/healthz", "/readyz", "/metrics")]


@pytest.mark.parametrize(("address", "mode"), CASES)
def test_every_answer_is_as_described(server: Running, address: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    (operation,) = schema[address].values()
    seen = answered = 0

    @settings(
        max_examples=100,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), sampled_from((None, *FILES)))
    def ask(case: Any, content: bytes | None) -> None:
        nonlocal seen, answered
        seen += 1
        if content is not None and mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["file"] = [content] if isinstance(case.body["file"], list) else content
        # any bytes are a file, also those of the word "false": the answer says that they are no image
        answer = case.call_and_validate(timeout=120, excluded_checks=[negative_data_rejection])
        answered += b'"judged"' in answer.content or b'"changed"' in answer.content

    ask()
    assert seen
    if address in WORK and mode == GenerationMode.POSITIVE:
        assert answered > 10
