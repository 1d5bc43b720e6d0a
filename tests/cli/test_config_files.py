"""Foreign YAML files: invalid content raises a ValueError."""

import pytest

from lightning_ptdp.cli.config_files import load_yaml, resolve_configs
from lightning_ptdp.cli.failures import UserError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: *b", "not YAML"),
        ("[" * 100_000, "nested more than 100 levels deep|not YAML"),
        ("[" * 101 + "]" * 101, "nested more than 100 levels deep"),
        ("a: " + "1" * 5000, "4300 digits"),
        ("a: !!int ''", "not have its declared type"),
        ("a: !!bool maybe", "not have its declared type"),
        ("a: !!timestamp x", "not have its declared type"),
        ("a: 2001-99-99", "month"),
        (
            "a: !!python/object/apply:os.system [echo]",
            "not YAML: could not determine a constructor",
        ),
        ("a: [", "not YAML"),
        ("a: 1\nb: {c: 1, d: 2,\n c: 3}", "'c' is given twice, in line 2 and in line 3"),
        ("a: [{b: 1,\n b: 2}]", "'b' is given twice, in line 1 and in line 2"),
        ("a: \0", "not YAML"),
    ],
)
def test_invalid_yaml_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        load_yaml(text)


def test_aliases_and_merge_keys_are_read():
    text = (
        "base: &base {lr: 1e-4, betas: [0.9, 0.95]}\nmodel: {<<: *base, layers: 4}\nother: *base\n"
    )
    assert load_yaml(text)["model"] == {"lr": 1e-4, "betas": [0.9, 0.95], "layers": 4}
    assert load_yaml("") is None


def test_merged_keys_are_not_duplicates():
    text = "a: &a {k: 1}\np: {b: &b {<<: *a, k: 2}}\nc: {<<: *b, m: 3}\nd: {<<: *a, m: 4}\n"
    assert load_yaml(text)["c"]["m"] == 3


def test_quoted_number_remains_text_in_file_with_base(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {name: '12e4567', rate: 1e-4}")
    (tmp_path / "mine.yaml").write_text(f"base: {tmp_path}/base.yaml\ndata: {{commit: '1e3'}}")
    (option,) = resolve_configs(["--config", str(tmp_path / "mine.yaml")])
    assert load_yaml(option.removeprefix("--config=")) == {
        "model": {"name": "12e4567", "rate": 1e-4},
        "data": {"commit": "1e3"},
    }


@pytest.mark.parametrize(
    "text",
    [
        "1: 2",
        "[1]",
        "data: {init_args: }",
        "base: [x]",
        f"base: {'x' * 5000}",
        "\0",
        "base: \ud800",
    ],
)
def test_error_names_configuration_file(tmp_path, text):
    (tmp_path / "mine.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"mine\.yaml") as raised:
        resolve_configs(["--config", str(tmp_path / "mine.yaml")])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000
