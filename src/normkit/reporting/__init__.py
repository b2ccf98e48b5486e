"""What all pages of normkit are made of: one template, one style sheet, one set of components.

A page is one file that opens offline. Its charts come in two kinds, chosen by what they cost:
small pictures that need no script are SVG (charts.py), which adds some kilobytes; charts that a
reader zooms, filters and switches are plotly's, whose library alone has 4.8 MB (the Python
package has no smaller bundle) and is embedded once, in pages that have such charts. So the page of
a diagnosis, which is mailed and kept by the dozen, stays below 100 KB and runs no script at all.
"""

from normkit.reporting.page import plotly_script as plotly_script
from normkit.reporting.page import render as render
