"""Parts of error messages."""

from lightning_ptdp.base.errors import did_you_mean, listed


def test_long_list_ends_with_number_of_others():
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(dict.fromkeys("abcde"), 3) == "a, b, c and 2 more"
    assert listed(["a", "b"], 1, "; ") == "a and 1 more"


def test_near_name_is_suggested():
    assert did_you_mean("1f1", ("1f1b", "gpipe")) == "Did you mean '1f1b'? "
    assert not did_you_mean("x", ("1f1b", "gpipe"))
