"""A diagnosis as one page that needs no network."""

from normkit.diagnosis.report.page import page as page
