"""The README's code runs as it stands, from top to bottom."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_each_block_runs_and_prints_what_its_comments_say():
    namespace = {}
    blocks = BLOCK.findall(README)
    assert len(blocks) == README.count("```python")
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), namespace)
        said = re.findall(r"^print\(.*\)  # ([^:\n]*)", block, re.MULTILINE)
        assert printed.getvalue().splitlines() == said
