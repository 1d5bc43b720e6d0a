"""``ptdp verify``."""

import pytest
import yaml

pytestmark = pytest.mark.thorough


CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "max_steps": 20,
        "strategy": {
            "class_path": "lightning_ptdp.PTDPStrategy",
            "init_args": {"num_microbatches": 2},
        },
        "default_root_dir": "written",
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}],
    },
    "model": {"class_path": "tests.verification.toys.Summed"},
    "data": {"class_path": "tests.verification.toys.Data"},
}


@pytest.mark.parametrize(("model", "code"), [("Lit", 0), ("Summed", 1)])
def test_exit_code_reports_equality_with_single_process(ptdp, tmp_path, model, code):
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump({**CONFIG, "model": {"class_path": f"tests.verification.toys.{model}"}})
    )
    ended, said, errors = ptdp(
        "verify",
        "--config",
        str(config),
        "--steps",
        "1",
        f"--trainer.default_root_dir={tmp_path / 'written'}",
    )
    assert ended == code, said + errors
    assert ("is equal to one process in 1 steps" in said) == (code == 0)
    assert ("cause: sum over samples" in said) == (code == 1)
    assert not (tmp_path / "written").exists()
