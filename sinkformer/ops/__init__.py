"""Operations of size n x m: the only room in which a kernel may live.

Every operation is one public function here; today each is the plain torch of ``reference``.
"""

from sinkformer.ops.reference import adjoint_solve as adjoint_solve
from sinkformer.ops.reference import apply as apply
from sinkformer.ops.reference import density as density
from sinkformer.ops.reference import marginals as marginals
from sinkformer.ops.reference import plan as plan
from sinkformer.ops.reference import rounding as rounding
from sinkformer.ops.reference import row_blocks as row_blocks
from sinkformer.ops.reference import softmin as softmin
