"""The configuration of a run: sections of typed keys, read from TOML."""

from sortedrl.config.config import SortedConfig as SortedConfig
