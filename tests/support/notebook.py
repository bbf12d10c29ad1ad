"""Runs the notebook of examples/ cell by cell. `PYTHONPATH=tests python -m support.notebook` stores what it shows."""

import base64
import contextlib
import io
import json

import matplotlib
import matplotlib.pyplot as plt
from support.pages import ROOT

NOTEBOOK = ROOT / "examples" / "figure.ipynb"


def run(notebook):
    """Outputs of each code cell, in the format of a notebook, and the names that the cells define."""
    namespace, outputs = {"__name__": "__main__"}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), namespace)
            outputs.append(_stream(printed.getvalue()) + [_picture(number) for number in plt.get_fignums()])
            plt.close("all")
    return outputs, namespace


def _stream(text):
    return [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []


def _picture(number):
    picture = io.BytesIO()
    plt.figure(number).savefig(picture, format="png", metadata={"Software": None})
    data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main():
    matplotlib.use("agg")
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs, _ = run(notebook)
    for count, (cell, shown) in enumerate(zip(cells, outputs, strict=True), 1):
        cell |= {"execution_count": count, "outputs": shown}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
