from normkit.layers.bn import BN as BN
