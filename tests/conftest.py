"""Fixtures of the whole suite."""

from __future__ import annotations

import pytest

from radixcast.models import resolve_model
from radixcast.models.embedded import embedded_file
from radixcast.protocols.errors import StartupError
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.server_args import ServerArgs


@pytest.fixture(scope="session")
def smollm2_spec() -> ModelSpec:
    """The embedded model, fetched on first use; tests that need it are skipped when it is not cached and can't be had."""
    cached = embedded_file("smollm2").exists()
    try:
        return resolve_model(ServerArgs())
    except StartupError as error:
        if cached:
            raise
        pytest.skip(f"the embedded model can't be fetched: {error}")
