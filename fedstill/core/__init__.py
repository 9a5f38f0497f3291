"""What every room uses: errors, seeds, devices, configuration tables, names, a run's files.

- Configuration: ``config_tables`` makes frozen dataclasses of tables and back, ``dotted_names`` lists what is
  in them, ``checked`` holds them to their types, ``toml`` and ``commented_toml`` read and write files,
  ``registry`` finds things by name, the package's own and those of others, and ``user_functions`` a user's
  own function.
- Computing: ``compute`` is device and precision, ``workers`` do independent work at once, ``seeds`` names
  every random draw, ``bootstrap`` draws cases, ``deadline`` ends what takes too long, ``dataset`` is data as
  tensors.
- A run's files: ``run_writer`` writes them, ``checkpoint`` is a state to go on from, ``clock`` counts its
  seconds, ``progress`` is what a person sees meanwhile, ``file_permissions`` keeps others out; ``hash_chain``
  shows what was changed in a log, ``fingerprints`` are what people compare, ``locks`` keep others waiting.
- ``errors`` are what a user can cause, each one clear line; ``text_format`` puts numbers into words.

May import nothing of fedstill. A newcomer adds an error here, or a check that several rooms need.
"""
