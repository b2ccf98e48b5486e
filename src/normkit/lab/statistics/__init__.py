"""What the results of an experiment show, and how sure one can be: pure functions.

``compare`` makes Comparisons of Results; the other names are its parts. scipy and
statsmodels are needed when they are called, not to import them.
"""

from normkit.lab.statistics.comparison import compare as compare
from normkit.lab.statistics.comparison import reach as reach
from normkit.lab.statistics.comparison import reached_look as reached_look
from normkit.lab.statistics.family import UNSTABLE as UNSTABLE
from normkit.lab.statistics.family import Decision as Decision
from normkit.lab.statistics.family import decide as decide
from normkit.lab.statistics.family import holm as holm
from normkit.lab.statistics.family import verdict as verdict
from normkit.lab.statistics.looks import PlannedLooks as PlannedLooks
from normkit.lab.statistics.paired import ALPHA as ALPHA
from normkit.lab.statistics.paired import effect as effect
from normkit.lab.statistics.paired import interval as interval
from normkit.lab.statistics.paired import more_seeds as more_seeds
from normkit.lab.statistics.paired import paired_t as paired_t
from normkit.lab.statistics.paired import sign_flip as sign_flip
from normkit.lab.statistics.paired import tost as tost
from normkit.lab.statistics.paired import two_sided as two_sided
