"""YAML of others: bounded, and every error has the file and the line.

Security F15 (the scanner), security L `import-config` (alias bombs, recursion).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lmetric.config import ConfigError, UniqueKeys, load_config
from lmetric.config.files import MAX_ALIASED, MAX_DEPTH, read_yaml_mapping

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: " + "[" * 100_000, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 100_000 + "a", f"nested more than {MAX_DEPTH} deep"),
        ("a: " + "{b: " * 100_000, f"nested more than {MAX_DEPTH} deep"),
        (BOMB, f":5: aliases repeat more than {MAX_ALIASED:,} values"),
        ("a: 1\nb: &b {c: *b}", ":2: alias 'b' contains itself"),
        ("a: 1\nb: 2024-13-45", ":2: month must be in 1..12"),
        ("a: 1\nb: " + "9" * 5_000, ":2: Exceeds the limit"),
        ("a: 1\na: 2", ":2: duplicate key 'a'"),
        ("a: 1\n? [b]\n: 2", ":2: found unhashable key"),
        ("a: !!python/object/apply:os.system [id]", ":1: a tag (!) is not supported"),
    ],
)
def test_hostile_files_get_a_message(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml_mapping(file)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    with pytest.raises(ConfigError, match="LMETRIC__ENGINES: not readable as YAML"):
        load_config(environ={"LMETRIC__ENGINES": "[" + text})


def test_usual_files_are_read_as_before() -> None:
    text = "base: &base {a: 1, b: [x, y]}\nc: *base\nd: {<<: *base, a: 2}\nlist: &l [1, 2]\nagain: [*l, *l]\n"
    assert yaml.load(text, UniqueKeys) == yaml.safe_load(text)
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert yaml.load(deep, UniqueKeys) == yaml.safe_load(deep)
    assert list(yaml.load_all("a: 1\n---\nb: 2\n", UniqueKeys)) == [{"a": 1}, {"b": 2}]
