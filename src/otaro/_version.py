"""The version that is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("otaro-llm")
except PackageNotFoundError:
    __version__ = "0+source"
