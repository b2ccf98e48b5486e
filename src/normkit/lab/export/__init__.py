"""Results as files for other programs: CSV, Parquet, and a LaTeX table.

Tables have a row for each run, for each epoch of each run, or for each comparison. Nothing is
rounded but in LaTeX.
"""

from normkit.lab.export.files import FORMATS as FORMATS
from normkit.lab.export.files import PER as PER
from normkit.lab.export.files import rows as rows
from normkit.lab.export.files import write as write
from normkit.lab.export.latex import latex as latex
