"""Lightning's model summary shows the whole model, without placeholders."""

import re

from lightning.pytorch.callbacks import ModelSummary

from tests.conformance.toys import LitNet, loader, make_trainer


class Told(ModelSummary):
    """Records the summary."""

    def on_fit_start(self, trainer, pl_module):
        found = self._summary(trainer, pl_module)
        self.told = (
            str(found._get_summary_data()),
            found.total_parameters,
            found.trainable_parameters,
            found.model_size,
        )


def _fit(rank, place, folder):
    told = Told(max_depth=2)
    trainer = make_trainer(
        place, max_steps=1, callbacks=[told], enable_model_summary=True, default_root_dir=folder
    )
    trainer.fit(LitNet(), loader())
    return told.told


def test_model_summary_matches_single_process(conformance, tmp_path):
    for found, single in conformance.pairs(_fit, "p2", str(tmp_path)):
        assert found == single
        assert "Linear" in found[0] and not re.search("Absent|Earlier|Later|Stub", found[0])
