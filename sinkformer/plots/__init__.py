"""Pictures, with matplotlib's manners: a function takes ``ax`` and returns it, and never calls ``show``."""

from sinkformer.plots.animations import animation as animation
from sinkformer.plots.calibration import reliability as reliability
from sinkformer.plots.counts import parameter_counts as parameter_counts
from sinkformer.plots.couplings import coupling as coupling
from sinkformer.plots.evaluations import distribution as distribution
from sinkformer.plots.evaluations import evaluation as evaluation
from sinkformer.plots.evaluations import evaluation_figure as evaluation_figure
from sinkformer.plots.figures import check_format as check_format
from sinkformer.plots.figures import new_axes as new_axes
from sinkformer.plots.figures import save as save
from sinkformer.plots.sequences import phases as phases
from sinkformer.plots.sequences import token_paths as token_paths
