"""Measuring the norms of a model: on batches, or while it trains."""

from normkit.diagnosis.observe.collect import MEASURES as MEASURES
from normkit.diagnosis.observe.collect import Measurements as Measurements
from normkit.diagnosis.observe.collect import Record as Record
from normkit.diagnosis.observe.collect import collect as collect
from normkit.diagnosis.observe.observer import Observed as Observed
from normkit.diagnosis.observe.observer import Observer as Observer
from normkit.diagnosis.observe.observer import observe as observe
