"""README keeps up with the tree."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate_file_map import with_file_map


def test_the_file_map_names_every_module_as_it_describes_itself() -> None:
    readme = Path("README.md").read_text()
    assert readme == with_file_map(readme), "run: python -m docs.generate_file_map"


def test_every_module_says_in_its_first_lines_what_it_is_for() -> None:
    readme = Path("README.md").read_text()
    assert re.findall(r"^- `[\w.]+`: *$", readme, re.MULTILINE) == []


def test_every_file_that_readme_links_to_exists() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", Path("README.md").read_text())
    assert targets
    assert [target for target in targets if not Path(target).exists()] == []
