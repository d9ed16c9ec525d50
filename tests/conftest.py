"""Shared fixtures: the stand-in host on the path, and one tiny checkpoint for the whole run."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("jev") is None:
    sys.path.insert(0, str(Path(__file__).with_name("open_jev")))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path for `--checkpoint` of a tiny random-weight package."""
    from openjev_fast_plugin.checkpoint import make_checkpoint

    return make_checkpoint("tiny", tmp_path_factory.mktemp("tiny") / "checkpoint")
