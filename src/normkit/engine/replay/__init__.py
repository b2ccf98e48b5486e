"""Steps of a layer that were recorded once and are started again from C++."""
