"""Requests generated from the OpenAPI schema, valid and invalid: responses conform to the schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from served import colour_model, serving

from cclnet.deploy.serve.app import create_app
from cclnet.deploy.serve.guard import ServeSettings

schemathesis = pytest.importorskip("schemathesis", reason="no schemathesis to try the API with")

TOKEN = "k7Jq-4uPz_0aXw9Lm2Tr"
SCHEMA = schemathesis.openapi.from_dict(
    create_app(colour_model(Path("colours")), ServeSettings("colours", token=TOKEN)).openapi()
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    examples = {"red": ["data:image/jpeg;base64,"]}
    with serving(tmp_path_factory.mktemp("run"), token=TOKEN, examples=examples) as started:
        yield started


@SCHEMA.parametrize()
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_responses_conform_to_the_schema(case: Any, address: str) -> None:
    case.call_and_validate(
        base_url=address,
        headers={"Authorization": f"Bearer {TOKEN}"},
        # No schema can require bytes to be an image, so random ones may be refused. The token is added above even where
        # a case leaves it out (`ignored_auth` tests that).
        excluded_checks=[schemathesis.checks.positive_data_acceptance, schemathesis.checks.negative_data_rejection],
    )
