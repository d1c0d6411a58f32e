"""Operations of size n x m: the only room in which a kernel may live.

Every operation is one public function here, in plain torch (``reference``). ``cpu`` holds the compiled kernels, which solve
a whole problem in one call; ``dispatch`` says which engine solves it, and why.
"""

from sinkformer.ops import cpu as cpu
from sinkformer.ops import scores as scores
from sinkformer.ops.autograd import plan as plan
from sinkformer.ops.reference import adjoint_solve as adjoint_solve
from sinkformer.ops.reference import apply as apply
from sinkformer.ops.reference import density as density
from sinkformer.ops.reference import density_of_atoms as density_of_atoms
from sinkformer.ops.reference import forbids as forbids
from sinkformer.ops.reference import marginals as marginals
from sinkformer.ops.reference import rounding as rounding
from sinkformer.ops.reference import row_blocks as row_blocks
from sinkformer.ops.reference import smallest_ritz as smallest_ritz
from sinkformer.ops.reference import softmin as softmin
