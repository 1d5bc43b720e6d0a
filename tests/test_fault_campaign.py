"""Checks of ci/faults.py: recognition of lost ranks in errors and judgement of a run."""

import importlib
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / "ci"

TABLE = """\
rank 3 (d1) lost another rank (step 7): Connection closed by peer
Last action of each rank:
  rank 0: step 7 since 0.3 s (reported 0.0 s ago)
  rank 1: step 6, waits in F2.1 for rank 2 since 0.1 s (reported 0.0 s ago)
  rank 2: step 6 since 0.2 s (reported 0.1 s ago)
  rank 3: step 7 since 0.4 s (this rank)"""


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("faults")


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        (TABLE, set()),
        (f"{TABLE}\nNo answer from rank 2, for 0.8 s: step 6", {2}),
        (TABLE.replace("rank 2: step 6", "rank 2: last reported 17 s ago: step 6"), {2}),
        (
            TABLE.replace(
                "rank 1: step 6",
                "rank 1: failed 0.1 s ago (lost another rank: no answer from rank 2): step 6",
            ),
            {2},
        ),
        (
            "rank 3 could not join the other ranks: ranks 0, 2 did not join: no answer within 20 s",
            {0, 2},
        ),
        (
            "rank 3 could not join the other ranks: rank 2 joined and then disappeared, its process has "
            "ended",
            {2},
        ),
        ("saving the checkpoint last.ckpt did not end within 20 s", set()),
        ("", set()),
    ],
)
def test_lost_ranks_are_read_from_error_message(faults, said, ranks):
    assert faults.blamed(said, by=3) == ranks


def test_late_or_missing_report_of_lost_rank_is_recorded(faults, tmp_path):
    from fault_campaign.processes import Ended

    campaign = faults.Campaign(
        layout="p2 d2 ZeRO", folder=tmp_path, draw=None, timeout_s=20.0, allow_s=0.0
    )
    said = f"{TABLE}\nNo answer from rank 1, for 0.8 s: step 6"
    early = dict.fromkeys(range(4), 1.0)
    ended = Ended(lost=1, lost_at=10.0, steps=dict.fromkeys(range(4), 6), began=early, met=early)
    ended.finished[0] = 9.0
    ended.errors = {2: (said, 11.0), 3: (said, 13.0)}
    assert campaign._judge("", (1,), ended, soon=2.0, late=26.0) == (1.0, 3.0)
    assert len(campaign.wrong) == 1
    assert campaign.wrong[0].startswith(
        ": rank 3 named the lost rank after 3.0 s, the bound is 2 s"
    )
    ended.errors[2] = (TABLE, 11.0)
    campaign._judge("", (1,), ended, soon=5.0, late=26.0)
    assert campaign.wrong[1].startswith(": rank 2 does not name the lost ranks (1,)")
    assert len(campaign.wrong) == 2


def test_full_limit_applies_to_rank_lost_before_joining(faults, tmp_path):
    from fault_campaign.processes import Ended

    campaign = faults.Campaign(layout="d2", folder=tmp_path, draw=None, timeout_s=20.0, allow_s=0.0)
    for victim, met, wrong in (
        (0, {0: 9.0}, 0),
        (0, {0: 9.0, 1: 9.5}, 1),
        (1, {0: 9.0}, 0),
        (1, {1: 9.0}, 1),
    ):
        ended = Ended(
            lost=victim,
            lost_at=10.0,
            steps=dict.fromkeys(range(2), -1),
            began=dict.fromkeys(range(2), 1.0),
            met=met,
        )
        ended.errors = {1 - victim: (f"rank {victim} did not join", 30.0)}
        before = len(campaign.wrong)
        campaign._judge("", (victim,), ended, soon=2.0, late=26.0)
        assert len(campaign.wrong) - before == wrong, (victim, met)


def test_campaign_tokens_are_read_by_token_loader(faults):
    from fault_campaign.training import Tokens

    from lightning_ptdp.data.loader import TokenLoader

    batch = next(iter(TokenLoader(Tokens(), batch_size=2)))
    assert batch["input_ids"].shape == batch["labels"].shape and len(batch["labels"]) == 2
