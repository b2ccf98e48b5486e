"""Networks by name: those of the libraries, fitted to the data, and small ones of our own."""

from normkit.lab.models.build import NATIVE as NATIVE
from normkit.lab.models.build import build as build
