"""Figures and claims of "Fine-Tuning Without Forgetting In-Context Learning" (arXiv 2602.23197)."""

from fastlin.experiments.forgetting.regimes import EightRegimes, OnTheory
from fastlin.experiments.forgetting.theory import FullTuning, Pretrained, ValueTuning

_MERGED = "Queries and keys are one matrix here, which q and k both name: their rows are the same."
_READOUT = "The readout is the last row of the value matrix."

FIGURES = {
    figure.name: figure
    for figure in (
        Pretrained(),
        FullTuning(),
        ValueTuning(),
        OnTheory(),
        EightRegimes("ff5", "Figure 5: eight ways to fine-tune", remarks=(_MERGED,)),
        EightRegimes("ff5-separate", "Figure 5, separate Q and K", model="separate", remarks=(_READOUT,)),
        EightRegimes("ff5-heads", "Figure 5, two attention heads, averaged", attention_heads=2, remarks=(_MERGED,)),
    )
}

__all__ = ["FIGURES", "EightRegimes", "FullTuning", "OnTheory", "Pretrained", "ValueTuning"]
