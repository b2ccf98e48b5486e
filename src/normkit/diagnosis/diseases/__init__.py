"""Normalization diseases: faults to inject into trained models, to test a diagnosis with."""

from normkit.diagnosis.diseases.catalog import DISEASES as DISEASES
from normkit.diagnosis.diseases.healthy import HEALTHY as HEALTHY
from normkit.diagnosis.diseases.patient import Disease as Disease
from normkit.diagnosis.diseases.patient import Patient as Patient
from normkit.diagnosis.diseases.trials import Trial as Trial
from normkit.diagnosis.diseases.trials import run_trials as run_trials
from normkit.diagnosis.diseases.trials import to_markdown as to_markdown
from normkit.diagnosis.diseases.ward import Ward as Ward
