"""Measurements, no losses: distances between couplings and between measures, with a certificate; scores of word links."""

from sinkformer.metrics.alignment import AlignmentScores as AlignmentScores
from sinkformer.metrics.alignment import LinkCounts as LinkCounts
from sinkformer.metrics.alignment import count_links as count_links
from sinkformer.metrics.alignment import coupling_tv as coupling_tv
from sinkformer.metrics.alignment import coupling_w1 as coupling_w1
from sinkformer.metrics.alignment import score_alignments as score_alignments
from sinkformer.metrics.alignment import target_coupling as target_coupling
from sinkformer.metrics.sets import directed_hausdorff as directed_hausdorff
from sinkformer.metrics.sets import hausdorff as hausdorff
from sinkformer.metrics.transport import W1Result as W1Result
from sinkformer.metrics.transport import w1 as w1
