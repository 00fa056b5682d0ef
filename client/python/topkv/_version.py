"""The version of the package: that of the library that it needs."""

__version__ = "0.1.0"
