"""An experiment's answer: as a page that needs no network, and as a table for a terminal."""

from normkit.lab.report.page import page as page
from normkit.lab.report.page import report as report
from normkit.lab.report.terminal import print_verdicts as print_verdicts
