"""Readers of research packs: public data sets used by the experiments here, each repacked into one file.

Each is a class as described in docs/custom-data.md, named in TOML as ``packs.mri:BrainMRI``. README.md
describes the content of each file.
"""
