"""Conversions fitted on a few unlabelled images, so that the new network gives what the old did."""

from normkit.conversion.fit.data import Fit as Fit
from normkit.conversion.fit.fit import fit_edits as fit_edits
from normkit.conversion.fit.report import FitReport as FitReport
from normkit.conversion.fit.report import FittedLayer as FittedLayer
