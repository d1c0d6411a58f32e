"""Distances between couplings and between measures, as measurements: numbers with a certificate, no losses."""

from sinkformer.metrics.sets import directed_hausdorff as directed_hausdorff
from sinkformer.metrics.sets import hausdorff as hausdorff
from sinkformer.metrics.transport import W1Result as W1Result
from sinkformer.metrics.transport import w1 as w1
