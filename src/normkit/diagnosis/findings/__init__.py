"""What can be wrong with the norms of a model, and how it is recognised."""

from normkit.diagnosis.findings.evidence import gather as gather
from normkit.diagnosis.findings.examine import KINDS as KINDS
from normkit.diagnosis.findings.examine import examine as examine
from normkit.diagnosis.findings.finding import SEVERITIES as SEVERITIES
from normkit.diagnosis.findings.finding import Finding as Finding
from normkit.diagnosis.findings.finding import Kind as Kind
from normkit.diagnosis.findings.finding import Undecided as Undecided
