"""What can be wrong with the norms of a model, and how it is recognised."""

from normkit.diagnosis.findings.examining import KINDS as KINDS
from normkit.diagnosis.findings.examining import examine as examine
from normkit.diagnosis.findings.finding import SEVERITIES as SEVERITIES
from normkit.diagnosis.findings.finding import Finding as Finding
from normkit.diagnosis.findings.finding import Kind as Kind
from normkit.diagnosis.findings.finding import Undecided as Undecided
from normkit.diagnosis.findings.gathering import gather as gather
