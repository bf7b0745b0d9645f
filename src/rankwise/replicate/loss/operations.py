# SPDX-License-Identifier: Apache-2.0
"""The table of operations between a loss and a model's outputs, by the names of their nodes in autograd's graph.

Data alone, for ``terms``. What is not here acts on each element by itself, or on dims whose numbers it saves.
"""

from __future__ import annotations

PASSING = frozenset(
    {
        "Alias",
        "Clone",
        "Contiguous",
        "Expand",
        "Neg",
        "Permute",
        "Reshape",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Squeeze",
        "T",
        "ToCopy",
        "Transpose",
        "UnsafeView",
        "Unsqueeze",
        "View",
    }
)
"""Linear in their one input, element by element: a mean of what they give is a mean of what they got."""
ADDING = frozenset({"Add", "Rsub", "Sub"})
"""Sums of terms."""
CHOOSING = frozenset({"Select", "Unbind"})
"""Take one row of a tensor."""
JOINING = frozenset({"Cat", "Stack"})
"""Lists of terms, if what they join are single numbers."""
SCALING = frozenset({"Mul", "Div"})
REDUCING = frozenset({"Mean", "Sum"})
COUPLING = frozenset(
    {
        "Amax",
        "Amin",
        "Cdist",
        "CdistForward",
        "Cummax",
        "Cummin",
        "Cumprod",
        "Cumsum",
        "Flip",
        "LinalgEigh",
        "LinalgSvd",
        "LinalgVectorNorm",
        "LogSoftmax",
        "Logsumexp",
        "Max",
        "Mean",
        "Median",
        "Min",
        "Norm",
        "Prod",
        "Roll",
        "Softmax",
        "Sort",
        "Std",
        "Sum",
        "Svd",
        "Topk",
        "Var",
        "VarMean",
    }
)
"""Let samples see one another where they act on the first dim, or on all."""
PRODUCTS = frozenset({"Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "Dot", "Mm", "Mv"})
"""Products of matrices: they couple samples where two factors come from a model's outputs."""
MATRIX_PRODUCTS = frozenset({"Addmm", "Mm"})
"""Those of two matrices: they add up over the columns of the first, and over the rows of the second."""
TRANSPOSING = frozenset({"Permute", "T", "Transpose"})
LOOKUPS = frozenset({"Embedding", "EmbeddingBag", "Gather", "Index", "IndexSelect"})
"""Choose rows of a parameter by samples, which are not in the graph."""
