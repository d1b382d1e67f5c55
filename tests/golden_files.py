"""Compares text with a file under tests/golden; `DTORCH_ACCEPT=1` writes the file instead.

In: a file name and the text made now. Out: nothing, or a failed assertion that shows the difference.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare with tests/golden/`name`. Review an accepted change of a golden file like code."""
    path = FOLDER / name
    if os.environ.get("DTORCH_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    assert path.exists(), f"{path} does not exist; run the test with DTORCH_ACCEPT=1 to write it"
    expected = path.read_text(encoding="utf-8")
    difference = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), name, "now", lineterm=""))
    assert text == expected, f"{difference}\nIf this is meant, accept it with DTORCH_ACCEPT=1 and review the change."
