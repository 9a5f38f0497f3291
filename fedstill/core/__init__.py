"""What every room uses: errors, seeds, devices, configuration tables, names, a run's files.

``errors`` has all that a user can cause, each one clear line. ``tables`` turns frozen dataclasses into TOML
and back. ``registry`` looks things up by name, the package's own and those of others. ``seeds`` names every
random draw. ``compute`` is device and precision. ``dataset`` is data as tensors. ``records`` and ``state``
are files.

May import nothing of fedstill. A newcomer adds an error here, or a check that several rooms need.
"""
