"""Many runs on equal terms: a comparison is planned, run, and gone on with.

``comparison`` is what a comparison is, ``comparison_file`` reads one from names or a file: its methods by
``comparison_methods``, its short forms by ``compact_form``. ``comparison_runner`` runs what is missing and
attacks it where that is wanted. ``reproduction``: the files that reproduce the papers' tables, and their
records, which ``reproduction_runner`` makes. Tables and pages are the report's.

May import attacks, runs and what lies below. A newcomer changes what counts as equal terms here.
"""
