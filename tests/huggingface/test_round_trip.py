"""Round trip of a folder for three architectures (ci/unseen_models.py runs more)."""

import pytest

from tests.huggingface.round_trip import CIRCLE, differences_around

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["gemma2", "phi3", "gpt2"])
def test_exported_folder_continues_training_in_one_process(name, pool, tmp_path):
    assert name in CIRCLE
    assert not differences_around(pool, name, tmp_path)
