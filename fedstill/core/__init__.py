"""Shared foundations: errors, seeds, devices, configuration tables, names and the files of a run.

- Configuration: ``config_tables`` reads TOML files, converts frozen dataclasses to tables and back and
  flattens them into dotted names. ``options`` checks fields against their types. ``registry`` finds built-in
  and custom objects by name.
- Computing: ``compute`` sets device and precision and runs independent functions in threads. ``cuda_graphs``
  captures training steps. ``seeds`` names every random stream. ``bootstrap`` resamples cases. ``timing``
  measures and limits time. ``dataset`` holds data as tensors, ``table_schema`` describes columns of tables.
- Files of a run: ``run_writer`` writes them, ``checkpoint`` saves a state to resume from, and ``progress``
  shows how far the run is. ``private_files`` restricts access and locks files. ``hashing`` computes
  fingerprints and hash chains.
- ``errors`` are what a user can cause, each as one clear line. ``text_format`` formats numbers and names,
  ``name_normalization`` compares names in users' files. ``safe_output`` removes control characters from
  output.

Core imports nothing else of fedstill. Add errors here, and checks that several packages need.
"""
