"""Figures and claims of "Fine-Tuning Without Forgetting In-Context Learning" (arXiv 2602.23197)."""

from fastlin.figures.forgetting.regimes import EightRegimes, OnTheory
from fastlin.figures.forgetting.theory import THEORY_FIGURES

_MERGED = "Queries and keys are one matrix here, so q and k train the same parameters and have the same rows."
_ALONE = (
    "Queries or keys alone cannot store a task at zero shots if the pretrained values do not read features. The less "
    "they read, the larger attention and few-shot errors grow during training."
)
_READOUT = "The readout is the last row of the value matrix."

FIGURES = {
    figure.name: figure
    for figure in (
        *THEORY_FIGURES,
        OnTheory(),
        EightRegimes("ff5", "Figure 5: eight ways to fine-tune", remarks=(_MERGED, _ALONE)),
        EightRegimes("ff5-separate", "Figure 5, separate Q and K", model="separate", remarks=(_READOUT, _ALONE)),
        EightRegimes(
            "ff5-heads", "Figure 5, two attention heads, averaged", attention_heads=2, remarks=(_MERGED, _ALONE)
        ),
    )
}
