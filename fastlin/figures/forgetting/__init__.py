"""Figures and claims of "Fine-Tuning Without Forgetting In-Context Learning" (arXiv 2602.23197)."""

from fastlin.figures.forgetting.regimes import EightRegimes, OnTheory
from fastlin.figures.forgetting.theory import FullTuning, Pretrained, ValueTuning

_MERGED = "Queries and keys are one matrix here, which q and k both name: their rows are the same."
_ALONE = (
    "Queries or keys alone cannot store a task at zero shots where the pretrained values read no features: the less "
    "these do, the larger attention grows, and few-shot errors with it, the more the longer it trains."
)
_READOUT = "The readout is the last row of the value matrix."

FIGURES = {
    figure.name: figure
    for figure in (
        Pretrained(),
        FullTuning(),
        ValueTuning(),
        OnTheory(),
        EightRegimes("ff5", "Figure 5: eight ways to fine-tune", remarks=(_MERGED, _ALONE)),
        EightRegimes("ff5-separate", "Figure 5, separate Q and K", model="separate", remarks=(_READOUT, _ALONE)),
        EightRegimes(
            "ff5-heads", "Figure 5, two attention heads, averaged", attention_heads=2, remarks=(_MERGED, _ALONE)
        ),
    )
}

__all__ = ["FIGURES", "EightRegimes", "FullTuning", "OnTheory", "Pretrained", "ValueTuning"]
