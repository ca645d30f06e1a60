"""The notebook runs from its first cell to its last, and comes to what it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "images_to_vram.ipynb"


def printed(notebook: Any) -> str:
    """What its cells wrote and returned."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs)


@pytest.mark.slow
def test_a_folder_of_jpegs_is_trained_on_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install 'stoker[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install 'stoker[dev]'")
    pytest.importorskip("PIL", reason="pip install 'stoker[images]'")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "stored without what a machine once printed"
    )

    monkeypatch.setenv("WORK", str(tmp_path))
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()

    text = printed(notebook)
    assert "339 records, complete" in text
    largest = re.search(r"batches of (\d+) images fit; trained with 32", text)
    assert largest
    assert 1 <= int(largest[1]) <= 512
    sources = "".join(cell.source for cell in notebook.cells)
    assert "disable_torch_compile()" in sources
    assert re.search(r"epoch 3: loss [\d.]+, stall [\d.]+ %, served from (host|device)", text)
    right = re.search(r"([\d.]+)% of 61 images that were not trained on are right", text)
    assert right
    assert float(right[1]) > 70
    pictures = [
        o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})
    ]
    assert len(pictures) == 1
