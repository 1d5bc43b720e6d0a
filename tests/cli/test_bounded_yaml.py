"""YAML from elsewhere: what would grow, or is not what it says, is one ValueError."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ptdp.cli.bounded_yaml import load_yaml
from lightning_ptdp.cli.error_messages import UserError
from lightning_ptdp.cli.inheritance import resolve_configs


def grown(form: str, times: int = 9) -> str:
    """Lists or mappings of the ones before: ``times`` to the power of ten, in a few lines."""
    lines = ["a0: &a0 {x: 1}"]
    return "\n".join(
        [
            *lines,
            *(
                f"a{i}: &a{i} {form.format(', '.join([f'*a{i - 1}'] * times))}"
                for i in range(1, 11)
            ),
        ]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (grown("[{}]"), "more than 20000 values"),
        (grown("{{<<: [{}]}}"), "more than 20000 values"),
        (
            "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 100))]),
            "64 deep",
        ),
        ("a: &a [*a]", "stands inside of what it stands for"),
        ("a: *b", "not YAML|stands for"),
        ("[" * 100_000, "64 deep|exceeded maximum nesting depth"),  # by PyYAML itself since 6.0.4
        ("{a: " * 1000, "64 deep"),
        ("- " * 1000, "64 deep"),
        ("? " * 1000, "64 deep"),
        ("[" + "x, " * 30_000 + "x]", "more than 20000 values"),
        ("a: " + "1" * 5000, "5000 digits"),
        ("a: " + "1:" * 5000 + "1", "10001 digits"),
        ("a: !!int ''", "not of the type"),
        ("a: !!bool maybe", "not of the type"),
        ("a: !!timestamp x", "not of the type"),
        ("a: 2001-99-99", "month"),
        (
            "a: !!python/object/apply:os.system [echo]",
            "not YAML: could not determine a constructor",
        ),
        ("a: [", "not YAML"),
        ("a: 1\nb: {c: 1, d: 2,\n c: 3}", "'c' is given twice, in line 2 and in line 3"),
        ("a: \0", "not YAML"),
    ],
)
def test_what_grows_or_lies_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_yaml(text)


def test_aliases_and_merges_of_people_are_read() -> None:
    text = (
        "base: &base {lr: 1e-4, betas: [0.9, 0.95]}\nmodel: {<<: *base, layers: 4}\nother: *base\n"
    )
    assert load_yaml(text)["model"] == {"lr": 1e-4, "betas": [0.9, 0.95], "layers": 4}
    assert load_yaml("") is None


@pytest.mark.parametrize(
    "text", [grown("[{}]"), "1: 2", "[1]", "base: [x]", f"base: {'x' * 5000}", "\0", "base: \ud800"]
)
def test_a_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"mine\.yaml") as raised:
        resolve_configs(["--config", str(tmp_path / "mine.yaml")])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000
