"""CiuicFlow: a drop-in communication gateway in front of DeepSeek inference servers."""

__version__ = "0.1.0.dev0"
