"""The normalizers, one file each. This list is the registry: everything else is drawn from it."""

from normkit.layers.batch_renorm import BatchRenorm as BatchRenorm
from normkit.layers.bcn import BCN as BCN
from normkit.layers.bgn import BGN as BGN
from normkit.layers.bn import BN as BN
from normkit.layers.bnet import BNET as BNET
from normkit.layers.cwn import CWN as CWN
from normkit.layers.dn import DN as DN
from normkit.layers.frozen_bn import FrozenBN as FrozenBN
from normkit.layers.gbgn import GBGN as GBGN
from normkit.layers.ghost_bn import GhostBN as GhostBN
from normkit.layers.gn import GN as GN
from normkit.layers.gw import GW as GW
from normkit.layers.ibn import IBN as IBN
from normkit.layers.iebn import IEBN as IEBN
from normkit.layers.in_ import IN as IN
from normkit.layers.input_norm import InputNorm as InputNorm
from normkit.layers.ln import LN as LN
from normkit.layers.pn import PN as PN
from normkit.layers.rbn import RBN as RBN
from normkit.layers.shifted_bn import ShiftedBN as ShiftedBN
from normkit.layers.sn import SN as SN
from normkit.layers.ssn import SSN as SSN
from normkit.layers.ubn import UBN as UBN
from normkit.layers.wn import WN as WN
from normkit.layers.ws import WS as WS
