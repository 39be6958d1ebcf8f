"""The server keeps what its own description promises, whatever it is sent."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection

from tests.serve.helpers import Running

WORK = ("/v1/examine", "/v1/counterfactual")
CASES = [(address, mode) for address in WORK for mode in GenerationMode]
CASES += [(address, GenerationMode.POSITIVE) for address in ("/v1/models", "/healthz", "/metrics")]


@pytest.mark.parametrize(("address", "mode"), CASES)
def test_every_answer_is_as_described(server: Running, address: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    (operation,) = schema[address].values()
    seen = 0

    @settings(
        max_examples=6,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal seen
        seen += 1
        # any bytes are a file, also those of the word "false": the answer says that they are no image
        case.call_and_validate(timeout=20, excluded_checks=[negative_data_rejection])

    ask()
    assert seen
