"""Names for the tensor shapes of the package: the file to read first.

Every alias is a plain ``torch.Tensor``; the string beside it is the shape. ``*batch`` stands for any number of leading
batch axes, the same for all arguments of one call, and may be empty.

=============  ==================  ==================================================================================
alias          shape               meaning
=============  ==================  ==================================================================================
Points         ``*batch n d``      coordinates of the atoms of a measure
Weights        ``*batch n``        their weights: non-negative, summing to one; weight zero is padding, or a probe
Features       ``*batch n r``      what a cost is evaluated on: the points themselves, or an encoder's output
Potential      ``*batch n``        a dual potential, ``f`` on the source or ``g`` on the target; float64
CostMatrix     ``*batch n m``      cost of every pair of atoms; ``+inf`` forbids a pair
PlanMatrix     ``*batch n m``      the mass a coupling puts on every pair
PerProblem     ``*batch``          one number for each problem of a batch
=============  ==================  ==================================================================================
"""

from typing import Annotated, TypeAlias

from torch import Tensor

Points: TypeAlias = Annotated[Tensor, "*batch n d"]
Weights: TypeAlias = Annotated[Tensor, "*batch n"]
Features: TypeAlias = Annotated[Tensor, "*batch n r"]
Potential: TypeAlias = Annotated[Tensor, "*batch n"]
CostMatrix: TypeAlias = Annotated[Tensor, "*batch n m"]
PlanMatrix: TypeAlias = Annotated[Tensor, "*batch n m"]
PerProblem: TypeAlias = Annotated[Tensor, "*batch"]
