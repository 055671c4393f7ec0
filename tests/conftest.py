"""What all tests share: the seed of their random inputs."""

import os
import random

import pytest

SEED = int(os.environ.get("ATTENTUNE_TEST_SEED", random.SystemRandom().randrange(1 << 31)))


def pytest_configure(config):
    # Workers of a parallel run take the seed of the process that started them.
    os.environ.setdefault("ATTENTUNE_TEST_SEED", str(SEED))


def pytest_report_header(config):
    return f"inputs: ATTENTUNE_TEST_SEED={os.environ['ATTENTUNE_TEST_SEED']}"


@pytest.fixture(scope="session")
def seed():
    """The seed of this run; set ATTENTUNE_TEST_SEED to repeat one."""
    return int(os.environ["ATTENTUNE_TEST_SEED"])
