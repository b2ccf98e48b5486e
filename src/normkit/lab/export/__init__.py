"""Results as files for other programs: CSV, Parquet, and a LaTeX table.

Tables have a row for each run, or one for each epoch of each run. Nothing is rounded but in LaTeX.
"""

from normkit.lab.export.latex import latex as latex
from normkit.lab.export.tables import PER as PER
from normkit.lab.export.writing import FORMATS as FORMATS
from normkit.lab.export.writing import write as write
