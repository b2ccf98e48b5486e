"""All diseases."""

from __future__ import annotations

from normkit.diagnosis.diseases import of_beginnings, of_data, of_layers, of_statistics, of_training
from normkit.diagnosis.diseases.patient import Disease

DISEASES: tuple[Disease, ...] = (
    *of_statistics.DISEASES,
    *of_beginnings.DISEASES,
    *of_training.DISEASES,
    *of_data.DISEASES,
    *of_layers.DISEASES,
)
