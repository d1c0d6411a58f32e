"""Distances between couplings and between measures, as measurements: numbers with a certificate, no losses."""

from sinkformer.metrics.transport import W1Result as W1Result
from sinkformer.metrics.transport import w1 as w1
