"""Kernel sources. Installed as `openjev_fast_plugin.csrc` so that the build finds them beside the package."""
