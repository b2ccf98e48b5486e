"""What the results of an experiment show, and how sure one can be: pure functions.

``compare`` makes Comparisons of Results; the other names are its parts. scipy is needed when
they are called, not to import them.
"""

from normkit.lab.statistics.comparison import compare as compare
from normkit.lab.statistics.comparison import reach as reach
from normkit.lab.statistics.intervals import interval as interval
from normkit.lab.statistics.paired_tests import ALPHA as ALPHA
from normkit.lab.statistics.paired_tests import effect as effect
from normkit.lab.statistics.paired_tests import holm as holm
from normkit.lab.statistics.paired_tests import paired_t as paired_t
from normkit.lab.statistics.paired_tests import sign_flip as sign_flip
from normkit.lab.statistics.paired_tests import tost as tost
from normkit.lab.statistics.paired_tests import verdict as verdict
from normkit.lab.statistics.power import more_seeds as more_seeds
