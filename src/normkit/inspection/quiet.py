"""Old names, until all callers have the new ones."""

from normkit.inspection.checks import refuse_lazy as refuse_lazy
from normkit.inspection.checks import refuse_meta as refuse_meta
from normkit.inspection.run import undisturbed as undisturbed
from normkit.inspection.run import version as version
