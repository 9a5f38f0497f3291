"""Readers of research packs: public data, each repacked into one file, that the experiments here use.

Each is a class as docs/custom-data.md describes, named in TOML as ``packs.mri:BrainMRI``; docs/tasks.md says
what is in which file.
"""
