"""What is wrong with the norms of a model: measures, observation, attribution, findings."""

from normkit.diagnosis.attribution import GapAttribution as GapAttribution
from normkit.diagnosis.attribution import attribute_gap as attribute_gap
from normkit.diagnosis.diagnose import diagnose as diagnose
from normkit.diagnosis.diagnosis import Diagnosis as Diagnosis
from normkit.diagnosis.disturbance import Disturbance as Disturbance
from normkit.diagnosis.disturbance import disturbance_test as disturbance_test
from normkit.diagnosis.disturbance import disturbed as disturbed
from normkit.diagnosis.findings.finding import Finding as Finding
from normkit.diagnosis.observe.collect import MEASURES as MEASURES
from normkit.diagnosis.observe.collect import Measurements as Measurements
from normkit.diagnosis.observe.collect import Record as Record
from normkit.diagnosis.observe.collect import collect as collect
from normkit.diagnosis.observe.observer import Observed as Observed
from normkit.diagnosis.observe.observer import Observer as Observer
from normkit.diagnosis.observe.observer import observe as observe
